"""`CompilerConfig`: TorchAir's object tree over the one option table."""

import ast
import copy
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch_npu

from npugraph_ex.config import OPTION_TABLE, CompilerConfig, Options
from npugraph_ex.configs.compiler_config import _process_kwargs_options
from npugraph_ex.errors import OptionValueError, UnknownOptionError


def _assign(config: CompilerConfig, path: str, value: object) -> None:
    *branches, leaf = path.split(".")
    node: object = config
    for branch in branches:
        node = getattr(node, branch)
    setattr(node, leaf, value)


def _read(config: CompilerConfig, path: str) -> object:
    node: object = config
    for name in path.split("."):
        node = getattr(node, name)
    return node


def test_an_untouched_config_is_the_defaults() -> None:
    """Nothing set means the default options."""
    assert CompilerConfig().to_options() == Options()


SWITCHABLE = [name for name, row in OPTION_TABLE.items() if row.default is True and row.torchair and not row.honoured]


@pytest.mark.parametrize("name", SWITCHABLE)
def test_a_torchair_path_sets_and_reads_its_flat_option(name: str) -> None:
    """Each path leads to its row, and an inverted one says the opposite in both directions."""
    row = OPTION_TABLE[name]
    config = CompilerConfig()
    assert _read(config, row.torchair) is (not row.inverted)
    _assign(config, row.torchair, row.inverted)
    assert getattr(config.to_options(), name) is False
    assert getattr(config, name) is False
    assert _read(config, row.torchair) is row.inverted


def test_the_guides_lines_work() -> None:
    """The assignments that the guides print are accepted and mean what they say."""

    def my_pass(gm: object, example_inputs: object, config: object) -> None:
        """Stand for a user's pass."""

    config = CompilerConfig()
    config.mode = "reduce-overhead"
    config.experimental_config.pattern_fusion_pass = False
    config.post_grad_custom_pre_pass = my_pass
    options = config.to_options()
    assert (options.mode, options.pattern_fusion_pass) == ("reduce-overhead", False)
    assert options.post_grad_custom_pre_pass is my_pass


def test_ge_settings_are_kept_and_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    """A setting of the GE engine changes no option and says once, aloud, that it has no effect here."""
    config = CompilerConfig()
    with caplog.at_level(logging.WARNING, logger="npugraph_ex"):
        config.debug.graph_dump.type = "pbtxt"
        config.ge_config.optimization_switch = "AutomaticUbFusion:off"
    assert [record.args[0] for record in caplog.records if record.args] == [
        "debug.graph_dump.type",
        "ge_config.optimization_switch",
    ]
    assert config.debug.graph_dump.type == "pbtxt"
    assert config.to_options() == Options()


def _settings_of_torchair() -> Iterator[str]:
    """The paths in the configuration of the TorchAir that torch_npu ships, read from its source: it needs CANN to be imported."""
    folder = Path(torch_npu.__file__).parent / "dynamo" / "torchair" / "configs"
    classes: dict[tuple[str, str], ast.ClassDef] = {}
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                classes[file.stem, node.name] = node

    def walk(module: str, name: str, path: str) -> Iterator[str]:
        for node in ast.walk(classes[module, name]):
            if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Attribute):
                continue
            attribute = node.targets[0].attr
            made = (
                node.value.func.id if isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name) else ""
            )
            owners = [module, *sorted({file for file, known in classes if known == made and file != module})]
            owner = next((file for file in owners if (file, made) in classes), "")
            if owner.endswith("_config"):
                yield from walk(owner, made, f"{path}{attribute}.")
            elif not attribute.startswith("_") and attribute != "value":
                yield path + attribute

    yield from walk("compiler_config", "CompilerConfig", "")


SETTINGS = sorted(set(_settings_of_torchair()))
NOT_TAKEN = {
    # Files that `torchair.dynamo_export` writes; this library has no such function.
    "export.export_mode", "export.export_name", "export.export_path_dir", "export.inputs_name", "export.weight_name",
}  # fmt: skip


def test_torchairs_settings_are_found() -> None:
    """The walk over its source finds settings of each section."""
    assert {"mode", "ge_config.oo_level", "debug.aclgraph.clone_input", "experimental_config.jit_compile"} <= {
        *SETTINGS
    }


@pytest.mark.parametrize("path", [path for path in SETTINGS if path not in NOT_TAKEN])
def test_each_setting_of_torchair_is_known(path: str) -> None:
    """A script that reads or sets it runs, with its own value back."""
    config = CompilerConfig()
    value = _read(config, path)
    if value is not None:
        _assign(config, path, value)
        assert _read(config, path) == value


def test_a_wrong_value_is_reported_under_the_users_spelling() -> None:
    """The message names the path that was written, not only the flat name."""
    config = CompilerConfig()
    with pytest.raises(OptionValueError, match=r"debug\.graph_dump\.type.*'svg'"):
        config.debug.graph_dump.type = "svg"
    with pytest.raises(OptionValueError, match=r"disable_reinplace_inplaceable_ops_pass.*inplace_pass.*got 1 \(int\)"):
        config.debug.aclgraph.disable_reinplace_inplaceable_ops_pass = 1


def test_a_wrong_path_is_refused_with_the_nearest_right_one() -> None:
    """A misspelt attribute is an error, not a new attribute."""
    config = CompilerConfig()
    with pytest.raises(UnknownOptionError, match=r"did you mean 'experimental_config\.pattern_fusion_pass'"):
        config.experimental_config.pattern_fusion_pas = False
    with pytest.raises(UnknownOptionError, match="did you mean 'mode'"):
        config.mod = "reduce-overhead"
    with pytest.raises(AttributeError, match="did you mean 'mode'"):
        _ = config.mod


def test_a_wrong_path_names_a_few_or_the_command() -> None:
    """The message fits a screen: the nearest names, or only the command that lists all."""
    config = CompilerConfig()
    with pytest.raises(UnknownOptionError, match=r"did you mean 'data_dump_dir' or 'data_dump_stage'\?"):
        config.data_dump = 1
    for section, name in ((config, "foo"), (config.experimental_config, "foo")):
        with pytest.raises(AttributeError, match=r"^no option is named '.*foo'; `npugraph-ex options` lists all$"):
            getattr(section, name).bar = 1


def test_a_section_is_no_place_for_a_value() -> None:
    """Assigning to a branch of the tree would cut it off, so it is refused."""
    with pytest.raises(UnknownOptionError, match=r"debug"):
        CompilerConfig().debug = None


def test_flat_options_apply_all_or_none() -> None:
    """The call of torch_npu and vLLM-Ascend sets every option, or none if one of them is wrong."""
    config = CompilerConfig()
    _process_kwargs_options(config, {"options": {"force_eager": True, "inplace_pass": False, "clone_output": False}})
    assert config.to_options().changed() == {"force_eager": True, "inplace_pass": False, "clone_output": False}
    with pytest.raises(UnknownOptionError):
        _process_kwargs_options(config, {"options": {"force_eager": False, "nonsense": 1}})
    assert config.force_eager is True


def test_a_copy_is_independent() -> None:
    """copy.deepcopy gives a config with the same values that can change alone."""
    config = CompilerConfig()
    config.force_eager = True
    other = copy.deepcopy(config)
    other.force_eager = False
    assert (config.force_eager, other.force_eager) == (True, False)


def test_two_configs_share_nothing() -> None:
    """Setting one config leaves another alone."""
    first, second = CompilerConfig(), CompilerConfig()
    first.debug.run_eagerly = True
    assert (first.force_eager, second.force_eager) == (True, False)
