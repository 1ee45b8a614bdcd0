"""The engine on a device with memory of its own: page-locked experts, residency decided there, one captured graph a decode step."""
