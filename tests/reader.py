"""Someone who follows the pages on a machine with an NPU: a folder, one Python program, and the commands of the project.

A command of `npugraph-ex` runs in this process, so that one import of torch and one device serve all of them, unless it shall not.
Other commands run in a shell.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType

import torch
import torch_npu
from printed import Block, agree, bash

import npu_emulator
import npugraph_ex
from npugraph_ex import cli
from npugraph_ex.fusion.registry import USER_RULES
from npugraph_ex.operators import OPERATORS


class Reader:
    """Follows the blocks of one page in order.

    Args:
        alone: commands of `npugraph-ex` that get a process, because they tell of all that their process compiled.

    Attributes:
        folder: where files are saved and commands run.
        program: what the Python blocks have defined so far; torch and the packages of the project are imported.
        output: what the latest block printed, on both streams.
        status: the exit status of the latest command.
    """

    def __init__(self, folder: Path, alone: Collection[str] = ()) -> None:
        """Begin with an empty folder, and with gradients: another page may have switched them off."""
        torch.set_grad_enabled(True)
        self.folder, self._alone, self.output, self.status = folder, alone, "", 0
        self.program = ModuleType("example")
        vars(self.program).update(torch=torch, torch_npu=torch_npu, npugraph_ex=npugraph_ex, npu_emulator=npu_emulator)

    def follow(self, block: Block) -> None:
        """Do what a block says; what it prints must be what the page shows."""
        if block.given:
            self.run(block.given)
        if block.prints:
            assert agree(block.code, self.output), f"the page shows\n{block.code}\nand it prints\n{self.output}"
        if block.file:
            (self.folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / block.file).write_text(block.code, encoding="utf-8")
        elif block.language == "python":
            self.run(block.code)
        for command, shown in block.commands:
            self.command(command)
            if shown:
                assert agree(shown, self.output), f"{command}\nthe page shows\n{shown}\nand it prints\n{self.output}"
            else:
                assert self.status == 0, f"{command}\n{self.output}"

    def run(self, code: str) -> None:
        """Run Python, as the file `example.py`."""
        file = self.folder / "example.py"
        file.write_text(code, encoding="utf-8")
        with self._caught():
            exec(compile(code, str(file), "exec"), vars(self.program))  # noqa: S102 - the page's own code

    def command(self, line: str) -> None:
        """Run one line of shell."""
        words = shlex.split(line)
        if words[0] != "npugraph-ex" or words[1] in self._alone:
            done = bash(line, self.folder)
            self.status, self.output = done.returncode, done.stdout
            return
        with self._caught():
            try:
                self.status = cli.main(words[1:])
            except SystemExit as end:
                self.status = end.code if isinstance(end.code, int) else int(end.code is not None)

    @contextmanager
    def _caught(self) -> Iterator[None]:
        """Keep what is printed, and show it beside an error; give back what a program changes in its process."""
        printed = io.StringIO()
        before = (sys.argv, list(sys.path), set(sys.modules), dict(os.environ), Path.cwd())
        dynamo = torch._dynamo.config.get_config_copy()
        rules, operators = {prepared.key for prepared in USER_RULES.snapshot()}, set(OPERATORS)
        os.chdir(self.folder)
        sys.path.insert(0, str(self.folder))
        sys.modules["example"] = self.program  # guards look their modules up there
        try:
            with redirect_stdout(printed), redirect_stderr(printed):
                yield
        except Exception as error:
            raise AssertionError(f"{printed.getvalue()}\n{''.join(traceback.format_exception(error))}") from error
        finally:
            torch.compiler.reset()
            for name, value in torch._dynamo.config.get_config_copy().items():
                if value != dynamo[name]:
                    setattr(torch._dynamo.config, name, dynamo[name])
            sys.argv, sys.path[:], modules, variables, folder = before
            for name in set(sys.modules) - modules:
                if str(getattr(sys.modules[name], "__file__", None)).startswith(str(self.folder)):
                    del sys.modules[name]
            sys.modules.pop("example", None)
            for prepared in USER_RULES.snapshot():
                if prepared.key not in rules:
                    USER_RULES.release(prepared.key)
            for name in set(OPERATORS) - operators:
                del OPERATORS._records[name]
            os.environ.clear()
            os.environ.update(variables)
            os.chdir(folder)
            said = printed.getvalue().replace(f"{self.folder}/", "")
            # Without the greeting of the device, and the frames of these tests in a report.
            self.output = re.sub(r"^(npu_emulator: | +/\S+:\d+ in ).*\n", "", said, flags=re.MULTILINE)
