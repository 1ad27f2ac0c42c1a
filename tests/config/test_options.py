"""`Options`: what is accepted, what is refused, and what the refusal says."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npugraph_ex.config import OPTION_TABLE, Options
from npugraph_ex.errors import OptionError, OptionNotAvailableError, OptionValueError, UnknownOptionError

SWITCHES = sorted(name for name, row in OPTION_TABLE.items() if isinstance(row.default, bool))


def test_defaults_are_the_contract() -> None:
    """The defaults are those of the contract, written here a second time on purpose."""
    assert {name: row.default for name, row in OPTION_TABLE.items()} == {
        "mode": "npugraph_ex",
        "force_eager": False,
        "require_capture": False,
        "use_graph_pool": None,
        "reuse_graph_pool_in_same_fx": True,
        "capture_limit": 64,
        "clone_input": True,
        "clone_output": None,
        "poison_results": False,
        "static_kernel_compile": False,
        "disable_static_kernel_compile_cache": False,
        "static_kernel_time_limit": 1800,
        "frozen_parameter": False,
        "stable_inputs_in_place": True,
        "remove_noop_ops": True,
        "remove_cat_ops": True,
        "inplace_pass": True,
        "input_inplace_pass": True,
        "check_numerics": False,
        "pattern_fusion_pass": True,
        "lift": "off",
        "join_projections": False,
        "every_row_attends": False,
        "auto_streams": False,
        "fusion_rules": None,
        "post_grad_custom_pre_pass": None,
        "post_grad_custom_post_pass": None,
        "dump_tensor_data": False,
        "data_dump_stage": "optimized",
        "data_dump_dir": "./",
        "super_kernel_optimize": False,
        "super_kernel_optimize_options": None,
        "super_kernel_debug_options": None,
        "deadlock_check": False,
        "capture_error_mode": "global",
        "force_recapture": False,
        "stream_check": "warn",
    }


def test_every_default_is_accepted_and_has_a_meaning() -> None:
    """The table is consistent: each default is a legal, available value and each row says what it means."""
    assert Options.from_mapping({name: row.default for name, row in OPTION_TABLE.items()}) == Options()
    assert all(row.meaning.endswith(".") for row in OPTION_TABLE.values())


def test_wrong_name_is_named_with_the_nearest() -> None:
    """A misspelt option is a ValueError with the nearest right name, which a list of all names would bury."""
    with pytest.raises(UnknownOptionError, match=r"'force_eagre'; did you mean 'force_eager'\?") as caught:
        Options.from_mapping({"force_eagre": True})
    assert isinstance(caught.value, ValueError)
    assert "capture_limit" not in str(caught.value)


@pytest.mark.parametrize("name", ["zzzz", "cudagraphs"])
def test_a_name_like_no_other_gets_no_guess(name: str) -> None:
    """No hint is better than a wild one: the message names the command that lists all names, and none of them."""
    with pytest.raises(UnknownOptionError) as caught:
        Options.from_mapping({name: 1})
    first = str(caught.value).splitlines()[0]
    assert first == f"no option is named '{name}'; `npugraph-ex options` lists all"


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("value", [0, 1, "True", None, 1.0])
def test_a_switch_takes_only_a_bool(name: str, value: object) -> None:
    """0 is not False: the message names the option, what is allowed and what came."""
    with pytest.raises(OptionValueError) as caught:
        Options.from_mapping({name: value})
    assert name in str(caught.value)
    assert "True or False" in str(caught.value)
    assert f"got {value!r} ({type(value).__name__})" in str(caught.value)


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "64"])
def test_capture_limit_is_an_int_from_one(value: object) -> None:
    """capture_limit refuses what is not an int of at least one; True is not one."""
    with pytest.raises(OptionValueError, match=r"capture_limit.*an int >= 1"):
        Options.from_mapping({"capture_limit": value})


@given(st.integers(min_value=1))
def test_capture_limit_takes_any_positive_int(limit: int) -> None:
    """Every positive int is kept as it is."""
    assert Options.from_mapping({"capture_limit": limit}).capture_limit == limit


def test_clone_output_has_three_values() -> None:
    """None is the safe default, True and False are promises of their own; 0 is none of them."""
    assert [Options.from_mapping({"clone_output": value}).clone_output for value in (None, True, False)] == [
        None,
        True,
        False,
    ]
    with pytest.raises(OptionValueError, match="None or True or False"):
        Options.from_mapping({"clone_output": 0})


def test_pool_handle_is_a_pair_of_ints() -> None:
    """use_graph_pool takes what torch.npu.graph_pool_handle() returns and says so otherwise."""
    assert Options.from_mapping({"use_graph_pool": (0, 7)}).use_graph_pool == (0, 7)
    with pytest.raises(OptionValueError, match="graph_pool_handle"):
        Options.from_mapping({"use_graph_pool": 7})


@pytest.mark.parametrize(
    ("name", "value"),
    [("super_kernel_optimize", True), ("super_kernel_optimize_options", {}), ("super_kernel_debug_options", {})],
)
def test_what_this_version_cannot_do_is_refused_not_ignored(name: str, value: object) -> None:
    """A legal value without an implementation raises and says which values work."""
    with pytest.raises(OptionNotAvailableError, match=f"'{name}' = .* is not available yet; "):
        Options.from_mapping({name: value})


@pytest.mark.parametrize("name", ["remove_noop_ops", "remove_cat_ops", "inplace_pass", "input_inplace_pass"])
def test_switching_an_optional_pass_off_is_always_honoured(name: str) -> None:
    """False asks for less work, which a version without the pass does anyway."""
    assert getattr(Options.from_mapping({name: False}), name) is False


def test_private_names_of_vllm_are_kept() -> None:
    """Names that begin `_vllm_` are kept with their values, unjudged, and read-only."""
    options = Options.from_mapping({"_vllm_aclnn_static_kernel_sym_range": [1, 2]})
    assert options.private == {"_vllm_aclnn_static_kernel_sym_range": [1, 2]}
    assert options.changed() == {"_vllm_aclnn_static_kernel_sym_range": [1, 2]}


def test_changed_tells_what_the_user_said() -> None:
    """Only values that differ from the default are listed."""
    assert Options.from_mapping({"force_eager": True, "clone_input": True}).changed() == {"force_eager": True}


def test_options_must_be_a_mapping() -> None:
    """A list of names is not options."""
    with pytest.raises(OptionError, match=r"takes a dict .* got \['force_eager'\] \(list\)"):
        Options.from_mapping(["force_eager"])  # type: ignore[arg-type]


def test_fusion_rules_are_switched_by_name() -> None:
    """A dict of names to bools, nothing else; whether a rule has that name is known only when a graph is compiled."""
    assert Options.from_mapping({"fusion_rules": {"add_rms_norm_cast": False}}).fusion_rules == {
        "add_rms_norm_cast": False
    }
    for wrong in ({"add_rms_norm_cast": 0}, ["add_rms_norm_cast"], {1: True}, True):
        with pytest.raises(OptionValueError, match="None or a dict"):
            Options.from_mapping({"fusion_rules": wrong})


def test_what_another_option_makes_possible_is_refused_alone() -> None:
    """A row that begins `With lift:` names the other one, and so does the error: nothing is ignored silently."""
    depending = {row.name: row.meaning for row in OPTION_TABLE.values() if row.meaning.startswith("With ")}
    assert depending.keys() == {"every_row_attends", "join_projections", "poison_results"}
    for name, meaning in depending.items():
        other = re.split("[=:]", meaning.removeprefix("With "))[0]
        with pytest.raises(OptionValueError, match=rf"{name} .*{other}="):
            Options.from_mapping({name: True})


def test_a_name_of_torchair_leads_to_the_option() -> None:
    """With its path or without, each setting of TorchAir that the table has is answered with the flat name."""
    for row in OPTION_TABLE.values():
        for spelt in {row.torchair, row.torchair.rpartition(".")[2]} - {"", *OPTION_TABLE}:
            said = rf"{re.escape(row.torchair)} is (the opposite of )?'{row.name}' here"
            with pytest.raises(UnknownOptionError, match=said) as error:
                Options.from_mapping({spelt: True})
            assert ("opposite" in str(error.value)) == row.inverted
    for spelt, path in (
        ("debug.graph_dump.type", "debug.graph_dump.type"),
        ("debug.graph_dump", "debug.graph_dump.type"),
        ("ge_config", "ge_config.aicore_num"),
        ("tiling_schedule_optimize", "experimental_config.tiling_schedule_optimize"),
    ):
        with pytest.raises(
            UnknownOptionError,
            match=rf"config\.{re.escape(path)} is a setting of mode 'max-autotune' \(GE\), which a CompilerConfig",
        ):
            Options.from_mapping({spelt: "txt"})
    with pytest.raises(UnknownOptionError, match=r"did you mean|lists all"):
        Options.from_mapping({"type": "txt"})  # of several settings


@pytest.mark.parametrize("name", ["post_grad_custom_pre_pass", "post_grad_custom_post_pass"])
def test_a_custom_pass_takes_three_arguments(name: str) -> None:
    """A function of another signature is refused when the option is given, not when it is called."""
    for right in (lambda _gm, _inputs, _config: None, lambda *_: None, lambda _a, _b, _c, _more=1: None, print):
        assert getattr(Options.from_mapping({name: right}), name) is right
    for wrong in (lambda _gm: None, lambda _a, _b, _c, _more: None, 3):
        with pytest.raises(OptionValueError, match=rf"'{name}' .* callable fn\(gm, example_inputs, config\)"):
            Options.from_mapping({name: wrong})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"poison_results": True}, "Add clone_output=False, or leave poison_results out"),
        ({"poison_results": True, "clone_output": True}, "with clone_output=True no result is given up"),
        ({"join_projections": True}, "Add lift='exact' or lift='judged', or leave join_projections out"),
        ({"every_row_attends": True, "lift": "exact"}, "with lift='exact' it does nothing"),
        ({"require_capture": True, "force_eager": True}, "force_eager captures nothing"),
        ({"require_capture": True, "dump_tensor_data": True}, "dump_tensor_data captures nothing"),
        ({"use_graph_pool": (0, 1), "reuse_graph_pool_in_same_fx": False}, "Leave one of them out"),
    ],
)
def test_values_that_contradict_each_other(given: dict[str, object], message: str) -> None:
    """Each is legal alone; together one would silently do nothing."""
    with pytest.raises(OptionValueError, match=message):
        Options.from_mapping(given)
