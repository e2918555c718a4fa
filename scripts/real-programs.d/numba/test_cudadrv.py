"""All tests of numba-cuda's wheel below tests/cudadrv, by names of their own: pytest cannot tell the package that they are in, which
answers to two names, from its folder."""

import importlib
import inspect
import pkgutil
import unittest

import numba.cuda.tests.cudadrv as package

for _, folder, _ in pkgutil.iter_modules(package.__path__):
    if folder.startswith("test_"):
        module = importlib.import_module(f"{package.__name__}.{folder}")
        for name, value in list(vars(module).items()):
            of_class = inspect.isclass(value) and issubclass(value, unittest.TestCase)
            of_function = inspect.isfunction(value) and name.startswith("test_")
            if (of_class or of_function) and value.__module__ == module.__name__:
                globals()[f"{folder}_{name}"] = value
# What is left of the loop would be taken for tests.
del value, module
