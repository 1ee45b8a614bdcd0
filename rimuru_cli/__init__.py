"""rimuru: run Mixture-of-Experts models that do not fit the GPU."""

__version__ = "0.1.0"
