"""In place of a package that is not in the tests' environment.

vLLM imports it to check any structured output, whichever backend makes it; here that is xgrammar.
"""


def __getattr__(name: str) -> type:
    return object
