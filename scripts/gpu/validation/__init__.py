"""The validation of sublet on a machine with a GPU: see docs/how-to/gpu-validation.md. Python 3.9 or later, standard library only."""
