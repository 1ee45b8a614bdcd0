"""The pool's memory: page sizes, who owns which page, the bytes themselves, and typed views of them."""
