"""`npugraph-ex cache`, and the folder that it looks at."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch

from npugraph_ex._own_files import default_directory
from npugraph_ex.cache.store import Store, read_entry
from npugraph_ex.cli import main
from npugraph_ex.errors import SavedGraphError
from npugraph_ex.inference import cache_compile
from npugraph_ex.saving import text

GRAPH = text.write(
    {"inputs": [{"name": "x", "dtype": "float32", "size": [2, "s0"], "stride": ["s0", 1]}]}, "def forward(): ..."
)
HEADER = {"torch": "2.13", "sources": '{"module:1-4": "abc"}', "graph_length": str(len(GRAPH.encode()))}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A folder with two saved compilations."""
    made = Store(tmp_path / "kept")
    for name in ("Model.forward-1", "Other.decode-2"):
        made.write(name, HEADER, b"before" + GRAPH.encode() + b"\nafter")
    return made


def _run(store: Store, *arguments: str) -> int:
    return main(["cache", "--dir", str(store.directory), *arguments])


def test_ls(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is a row; one that is damaged says so, and the status is 1."""
    assert _run(store, "ls") == 0
    shown = capsys.readouterr().out
    assert "Model.forward-1" in shown
    assert "Other.decode-2" in shown
    path = store.path("Other.decode-2")
    path.write_bytes(path.read_bytes()[:-1])
    assert _run(store, "ls") == 1
    assert "cut off" in capsys.readouterr().out


def test_the_folder_after_the_action_and_one_that_cannot_be_read(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both places are good for `--dir`; a folder without permission is no empty one."""
    assert main(["cache", "ls", "--dir", str(store.directory)]) == 0
    assert "2 saved compilations" in capsys.readouterr().out

    def refused(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refused)
    assert _run(store, "ls") == 2
    assert f"{store.directory} cannot be read: Permission denied" in capsys.readouterr().err


def test_show(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """By name, with its suffix or without, or by path: versions, sources, inputs, graph; a name that is not there is named."""
    for name in ("Model.forward-1", "Model.forward-1.nge", str(store.path("Model.forward-1"))):
        assert _run(store, "show", name) == 0
        shown = capsys.readouterr().out
        for part in ("2.13", "module:1-4", "2, s0", "def forward(): ..."):
            assert part in shown
    assert _run(store, "show", "Model.backward") == 2
    assert "no saved compilation 'Model.backward'" in capsys.readouterr().err


def test_show_takes_the_beginning_of_a_name(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """Or another part of it, where only one name has it; of several the names are listed."""
    for part in ("Oth", "decode"):
        assert _run(store, "show", part) == 0
        assert "def forward(): ..." in capsys.readouterr().out
    store.write("Other.decode-20", HEADER, b"")
    assert _run(store, "show", "Oth") == 2
    told = capsys.readouterr().err
    assert "'Oth' is a part of 2 names" in told
    assert all(f"\n  {name}\n" in told for name in ("Other.decode-2", "Other.decode-20"))


def test_show_says_how_compilations_of_one_name_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """When each was written, and what its call or the globals that it read were; what is the same in all is left out."""
    for dtype, scale in ((torch.float16, 2.0), (torch.float32, 2.0), (torch.float32, 3.0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "SCALE", scale)
            cache_compile(_scaled, cache_dir=tmp_path)(torch.ones(3, dtype=dtype, device="npu"))
    assert main(["cache", "--dir", str(tmp_path), "show", "_scaled"]) == 2
    told = capsys.readouterr().err
    assert "'_scaled' is a part of 3 names; which of them?\n  _scaled-" in told
    found = re.findall(r"\n    written (?:[-\d]+ [:\d]+ UTC); (.*)", told)
    assert sorted(found) == [
        "SCALE 2.0; L_x_ float16 s77", "SCALE 2.0; L_x_ float32 s77", "SCALE 3.0; L_x_ float32 s77",
    ]  # fmt: skip


def _of_two_forms(x: torch.Tensor, *, squared: bool) -> torch.Tensor:
    return x.neg() * x if squared else x.neg()


def test_show_tells_compilations_for_flags_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flag is no input of the graph and no global, so the graphs' first calls that differ are named."""
    saved = cache_compile(_of_two_forms, cache_dir=tmp_path)
    for squared in (True, False):
        saved(torch.ones(3, device="npu"), squared=squared)
    assert main(["cache", "--dir", str(tmp_path), "show", "_of_two_forms"]) == 2
    found = re.findall(r"\n    written (?:[-\d]+ [:\d]+ UTC); (.*)", capsys.readouterr().err)
    assert [*map(str.split, sorted(found))] == [
        ["its", "graph", "ends", "sooner"],
        ["its", "graph", "goes", "on", "with", "aten.mul_.Tensor(neg,", "arg1_1)"],
    ]


SCALE = 1.0


def _scaled(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


def test_ls_shows_names_whole(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a narrow terminal too: a name that is cut is none that `show` takes."""
    name = "models.decoder.Decoder.forward-" + "0123456789abcdef" * 6
    store.write(name, HEADER, b"")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    assert _run(store, "ls") == 0
    assert name in capsys.readouterr().out.split()


@pytest.mark.parametrize("action", [["ls"], ["show", "Model.forward-1"], ["clear"]])
def test_a_folder_that_is_not_there(tmp_path: Path, action: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A mistyped --dir is no empty cache: the error names it, and nothing is made."""
    missing = tmp_path / "compield"
    assert main(["cache", "--dir", str(missing), *action]) == 2
    told = capsys.readouterr()
    assert f"--dir '{missing}' is no folder" in told.err
    assert told.out == ""
    assert not missing.exists()


def test_nothing_kept_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The default folder is made when something is kept: its absence is said, and is no error; a file in its place is one."""
    folder = tmp_path / "nothing"
    monkeypatch.setenv("NPUGRAPH_EX_CACHE", str(folder))
    for action in ("ls", "clear"):
        assert main(["cache", action]) == 0
        assert f"there is no folder {folder}" in capsys.readouterr().out
    assert main(["cache", "show", "x"]) == 2
    assert f"there is no folder {folder}" in capsys.readouterr().err
    folder.mkdir()
    assert main(["cache", "ls"]) == 0
    assert capsys.readouterr().out == f"0 saved compilations in {folder}\n"
    folder.rmdir()
    folder.write_text("mine")
    assert main(["cache", "ls"]) == 2
    assert f"{folder} is a file" in capsys.readouterr().err


def test_clear(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """Those whose names begin so, or all; other files of the folder stay."""
    other = store.directory / "notes.txt"
    other.write_text("mine")
    assert _run(store, "clear", "Model.") == 0
    assert capsys.readouterr().out.startswith("1 saved compilation deleted")
    assert [path.name for path in store.entries()] == ["Other.decode-2.nge"]
    assert _run(store, "clear") == 0
    assert list(store.directory.iterdir()) == [other]


def test_clear_by_the_name_of_a_file(store: Store) -> None:
    """The suffix that a warning shows belongs to one file, and not to those whose names go on."""
    store.write("Model.forward-12", HEADER, b"")
    assert _run(store, "clear", "Model.forward-1.nge") == 0
    assert [path.name for path in store.entries()] == ["Model.forward-12.nge", "Other.decode-2.nge"]


def test_the_folder_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """First our own variable, then the user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("NPUGRAPH_EX_CACHE", raising=False)
    assert default_directory() == tmp_path / "npugraph_ex"
    monkeypatch.setenv("NPUGRAPH_EX_CACHE", str(tmp_path / "mine"))
    assert default_directory() == tmp_path / "mine"


def test_files_are_for_their_owner_alone(store: Store) -> None:
    """Folder and files are written so that nobody else reads or writes them."""
    assert store.directory.stat().st_mode & 0o777 == 0o700
    assert store.path("Model.forward-1").stat().st_mode & 0o777 == 0o600


def test_writers_and_readers_at_once(tmp_path: Path) -> None:
    """While several write the same name, every reader sees one of the whole contents, and no scrap is left behind."""
    store = Store(tmp_path)
    contents = {bytes([65 + number]) * 50_000 for number in range(4)}
    seen: set[bytes] = set()
    failures: list[Exception] = []
    store.write("name", HEADER, min(contents))

    def write(payload: bytes) -> None:
        for _ in range(40):
            store.write("name", HEADER, payload)

    def read() -> None:
        try:
            for _ in range(200):
                seen.add(read_entry(store.path("name")).payload)
        except SavedGraphError as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(payload,)) for payload in contents]
    threads += [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert seen <= contents
    assert [path.name for path in tmp_path.iterdir()] == ["name.nge"]
