"""The runtime's own declarations of CANN's interface, against the headers of the installed torch_npu."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from npu_emulator.build import torch_npu_folder
from npu_emulator.compilation import SOURCES, compiler

_PROGRAM = """
#include <cstddef>
#include <cstdint>
namespace ours {{
#include "cann.h"
#include "hccl.h"
constexpr int64_t numbers[] = {{ {names} }};
}}
#include "acl/acl.h"
#include "acl/acl_op_compiler.h"
#include "acl/error_codes/rt_error_codes.h"
#include "third_party/hccl/inc/hccl/hccl.h"
{numbers}
{sizes}
static_assert(offsetof(ours::aclrtPtrAttributes, location) == offsetof(aclrtPtrAttributes, location));
static_assert(offsetof(ours::HcclCommConfig, hcclCommName) == offsetof(HcclCommConfig, hcclCommName));
static_assert(offsetof(ours::HcclSendRecvItem, remoteRank) == offsetof(HcclSendRecvItem, remoteRank));
static_assert(offsetof(ours::aclrtMemLocation, type) == offsetof(aclrtMemLocation, type));
#include "runtime.cpp"
"""


@pytest.mark.slow
def test_our_declarations_are_those_of_torch_npu(tmp_path: Path) -> None:
    """Each constant has CANN's number and each type its size; each function that CANN declares has its signature.

    The runtime is compiled behind CANN's headers, whose declarations the compiler compares with the definitions. The
    libraries are then right for this torch_npu, though they were not compiled against its headers.
    """
    text = "".join((SOURCES / name).read_text() for name in ("cann.h", "hccl.h"))
    names = re.findall(r"\b((?:ACL|HCCL)_\w+) =", text)
    types = re.findall(
        r"^(?:enum|struct) (\w+) (?::|\{)|^typedef [\w*]+ (\w+);|^typedef void \(\*(\w+)\)", text, re.MULTILINE
    )
    assert len(names) > 50 < 2 * len(types)
    program = tmp_path / "program.cpp"
    program.write_text(
        _PROGRAM.format(
            names=", ".join(names),
            numbers="\n".join(
                f'static_assert(ours::numbers[{at}] == {name}, "{name}");' for at, name in enumerate(names)
            ),
            sizes="\n".join(
                f"static_assert(sizeof(ours::{name}) == sizeof({name}));"
                for name in map("".join, types)
                if name != "HcclCommConfig"
            ),
        )
    )
    root = torch_npu_folder() / "include"
    include = root / "third_party" / "acl" / "inc"
    folders = [f"-I{folder}" for folder in (SOURCES, root, include, include / "acl")]
    done = subprocess.run(
        [*compiler(), "-fsyntax-only", "-std=c++17", *folders, str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
