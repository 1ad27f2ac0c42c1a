"""`CompilerConfig`: TorchAir's object tree over the one option table."""

import copy
import importlib
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch_npu

from npugraph_ex.config import OPTION_TABLE, CompilerConfig, Options
from npugraph_ex.configs.compiler_config import _process_kwargs_options
from npugraph_ex.errors import OptionError, OptionValueError, UnknownOptionError


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


@pytest.fixture(scope="module")
def theirs() -> Iterator[Callable[[], Any]]:
    """Makes a config of the TorchAir that torch_npu ships. TorchAir itself needs CANN, so what its config imports stands in."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "torchair"}
    package, errors, utils = ModuleType("torchair"), ModuleType("torchair._utils.error_code"), ModuleType("utils")
    package.__path__ = [str(Path(torch_npu.__file__).parent / "dynamo" / "torchair")]
    errors.pretty_error_msg = lambda function: function  # type: ignore[attr-defined]
    utils.logger = logging.getLogger("stand-in")  # type: ignore[attr-defined]
    for name in before:
        del sys.modules[name]
    sys.modules.update(
        {"torchair": package, "torchair._utils.error_code": errors, "torchair.core.utils": utils}
        | {name: ModuleType(name) for name in ("torchair._utils", "torchair.core")}
    )
    try:
        yield importlib.import_module("torchair.configs.compiler_config").CompilerConfig
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchair"]:
            del sys.modules[name]
        sys.modules.update(before)


def _settings(section: object, path: str = "") -> Iterator[tuple[str, object]]:
    """The path of each setting below a section of TorchAir's config, and what holds its value."""
    own = {*vars(section), *getattr(section, "_fixed_attrs", ()), *getattr(section, "ALLOWED_OPTIONS", ())}
    for name in sorted(own - {"_fixed_attrs"}):
        value = getattr(section, name)
        if type(value).__module__.startswith("torchair.configs.") and not hasattr(value, "value"):
            yield from _settings(value, f"{path}{name}.")
        else:
            yield path + name, value


def test_each_setting_of_torchair_is_known(theirs: Callable[[], Any]) -> None:
    """A script that reads or sets it runs, with its own value back."""
    settings = [path for path, _ in _settings(theirs())]
    config = CompilerConfig()
    for path in settings:
        value = _read(config, path)
        if value is not None:
            _assign(config, path, value)
            assert _read(config, path) == value, path
    assert len(settings) == len(set(settings)) > 90
    assert {
        "mode", "ge_config.oo_level", "debug.aclgraph.clone_input", "debug.graph_dump.path", "export.export_name",
        "experimental_config.aclgraph._aclnn_static_shape_kernel_sym_index", "npugraphex_config.force_eager",
    } <= {*settings}  # fmt: skip


HONOURED_LATER = re.compile(r"super_kernel")
TRIED = (
    None,
    True,
    False,
    "",
    "x",
    "O1",
    "O9",
    "0|2-5",
    "Mul_1 Add1",
    "a,b",
    -2,
    -1,
    0,
    1,
    7,
    [],
    [1, 2],
    ["x"],
    {},
    {"a": 1},
)


def _takes(config: Any, path: str, value: object) -> bool:
    try:
        _assign(config, path, value)
    except (TypeError, ValueError, OptionError):
        return False
    return True


def test_values_that_torchair_refuses_are_refused(theirs: Callable[[], Any]) -> None:
    """Those of settings whose values it declares. Of those, the declared ones are taken."""
    for path, held in _settings(theirs()):
        if (
            path.startswith("npugraphex_config.")
            or "path" in path
            or path.endswith("_file")
            or HONOURED_LATER.search(path)
        ):
            continue  # their values are not declared, or are files of the machine; or no kernels are merged yet
        declared = getattr(held, "optional", None) or ()
        for value in declared:
            assert _takes(CompilerConfig(), path, value), (path, value)
        for value in TRIED:
            # Where nothing is set, None is our default. TorchAir takes 0 and 1 for False and True; here they are refused.
            if value is not None and not _takes(theirs(), path, value):
                assert not _takes(CompilerConfig(), path, value), (path, value)


def test_a_setting_without_effect_says_what_reads_it(caplog: pytest.LogCaptureFixture) -> None:
    """GE, the export, or TorchAir's own compilation of static kernels."""
    config = CompilerConfig()
    with caplog.at_level(logging.WARNING, logger="npugraph_ex"):
        config.export.export_mode = True
        config.experimental_config.aclgraph._aclnn_static_shape_kernel_build_dir = "kernels"
    assert [record.getMessage().partition(" is ")[2] for record in caplog.records] == [
        "a setting of torchair.dynamo_export; it has no effect on this backend",
        "a setting of TorchAir's own compilation of static kernels; it has no effect on this backend",
    ]


def test_settings_of_static_kernels_are_vllms_options() -> None:
    """TorchAir's paths and vLLM-Ascend's flat names are one thing, as are flat names below `npugraphex_config`."""
    config = CompilerConfig()
    kernels = config.experimental_config.aclgraph
    assert (kernels._aclnn_static_shape_kernel_sym_index, kernels._aclnn_static_shape_kernel_sym_value_range) == (
        0,
        None,
    )
    kernels._aclnn_static_shape_kernel_sym_index = 1
    kernels._aclnn_static_shape_kernel_sym_value_range = [2, 4]
    config.npugraphex_config.force_eager = True
    private = {"_vllm_aclnn_static_kernel_sym_index": 1, "_vllm_aclnn_static_kernel_sym_range": [2, 4]}
    assert config.to_options() == Options.from_mapping({"force_eager": True, **private})
    assert config.npugraphex_config._vllm_aclnn_static_kernel_sym_index == 1
    assert config.as_torchair() == {
        "experimental_config.aclgraph._aclnn_static_shape_kernel_sym_index": 1,
        "experimental_config.aclgraph._aclnn_static_shape_kernel_sym_value_range": [2, 4],
        "debug.run_eagerly": True,
    }
    with pytest.raises(UnknownOptionError, match=r"sym_index is '_vllm_aclnn_static_kernel_sym_index' here"):
        Options.from_mapping({"_aclnn_static_shape_kernel_sym_index": 1})


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
