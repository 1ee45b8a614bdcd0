"""The engine: scheduling, memory, experts, sampling. It talks to no person: no console, no network."""
