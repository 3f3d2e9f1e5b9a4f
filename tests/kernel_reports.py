"""What the compiler says of a kernel of Triton, as for a GPU: none is needed for it.

The file is run as a process of its own, without the interpreter, under which tests run kernels.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path


def reports_of(module, kernel, cases, capability, folder):
    """A report per case: bytes spilled, registers, bytes of shared memory, barriers, and the
    accesses of global memory in order, as ``ld v2.b64``.

    Args:
        module: of the kernel.
        kernel: its name.
        cases: (types of its arguments by name, values of its constants by name, warps).
        capability: of the GPU: 80, 90, 100.
        folder: for what the compiler writes.
    """
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    result = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps([module, kernel, cases, capability]),
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
        cwd=folder,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def _report(kernel, signature, constants, warps, capability):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    # The launcher says of what is aligned to 16 bytes that it is; tables always are.
    tables = [(place,) for place, kind in enumerate(signature.values()) if kind[0] == "*"]
    made = triton.compile(
        ASTSource(
            kernel,
            signature=signature | dict.fromkeys(constants, "constexpr"),
            constexprs=constants,
            attrs={place: [["tt.divisibility", 16]] for place in tables},
        ),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "enable_fp_fusion": False},
    )
    ptx = made.asm["ptx"]
    Path("kernel.ptx").write_text(ptx)
    name = _found("[.]target (sm_[0-9a-z]+)", ptx)
    command = [get_ptxas(capability).path, "-v", "--gpu-name", name, "kernel.ptx", "-o", "kernel"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "spilled": int(_found("([0-9]+) bytes spill stores", said)),
        "registers": int(_found("Used ([0-9]+) registers", said)),
        "shared": made.metadata.shared,
        "barriers": len(re.findall("bar[.]sync", ptx)),
        "accesses": [" ".join(each) for each in re.findall(r"(ld|st)[.]global[.](\S+)", ptx)],
    }


def _found(pattern, text):
    """What the group of a pattern stands for in a text that has it."""
    match = re.search(pattern, text)
    assert match is not None, text
    return match[1]


if __name__ == "__main__":
    import importlib

    module, name, cases, capability = json.load(sys.stdin)
    kernel = getattr(importlib.import_module(module), name)
    reports = [
        _report(kernel, signature, constants, warps, capability)
        for signature, constants, warps in cases
    ]
    print(json.dumps(reports))
