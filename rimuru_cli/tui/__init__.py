"""The dashboard: one page pool's composition live, and a chat beside it. Nothing outside this room but its lazy callers imports textual."""
