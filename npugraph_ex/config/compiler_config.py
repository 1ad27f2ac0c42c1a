"""`CompilerConfig`: the option table worn as the object tree that scripts written for TorchAir fill in.

It holds no option of its own. A path such as `experimental_config.pattern_fusion_pass` is looked up in the table; flat
names work on the object itself, and below `npugraphex_config`, where TorchAir has them. Settings of TorchAir's GE engine
are accepted with a warning, because this backend does not run GE.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npugraph_ex.config.ge_settings import GE_SETTINGS, PRIVATE_SETTINGS, reader_of
from npugraph_ex.config.option import Option, unknown_option
from npugraph_ex.config.options import OPTION_TABLE, PRIVATE_PREFIX, Options
from npugraph_ex.errors import OptionValueError
from npugraph_ex.observe.logger import logger

_BY_PATH: Mapping[str, Option] = {row.torchair: row for row in OPTION_TABLE.values() if row.torchair}
_FLAT = "npugraphex_config."
_PRIVATE = {name: path for path, (name, _, _) in PRIVATE_SETTINGS.items()}
_PATHS = frozenset({*_BY_PATH, *GE_SETTINGS, *PRIVATE_SETTINGS})
_SECTIONS = frozenset(path.rsplit(".", depth)[0] for path in _PATHS for depth in range(1, path.count(".") + 1)) | {
    _FLAT[:-1]
}


class CompilerConfig:
    """The options of one compilation, changeable until the backend reads them.

    Example:
        >>> config = CompilerConfig()
        >>> config.mode = "reduce-overhead"
        >>> config.experimental_config.pattern_fusion_pass = False
        >>> config.to_options().pattern_fusion_pass
        False
    """

    def __init__(self) -> None:
        object.__setattr__(self, "_values", {})

    def __getattr__(self, name: str) -> Any:
        return _get(self, name)

    def __setattr__(self, name: str, value: object) -> None:
        _set(self, name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *OPTION_TABLE, *(section.split(".")[0] for section in _SECTIONS)})

    def __repr__(self) -> str:
        written = ", ".join(f"{name}={value!r}" for name, value in sorted(self._values.items()))
        return f"CompilerConfig({written})"

    def to_options(self) -> Options:
        """Freeze what has been set into the value that the compiler reads."""
        return Options.from_mapping({name: value for name, value in self._values.items() if name not in GE_SETTINGS})

    def as_torchair(self) -> dict[str, object]:
        """What has been set, by TorchAir's paths and in its sense.

        Raises:
            OptionValueError: an option is set that TorchAir does not have.
        """
        written: dict[str, object] = {}
        for name, value in self._values.items():
            row = OPTION_TABLE.get(name)
            if name in GE_SETTINGS:
                written[name] = value
            elif name in _PRIVATE:
                written[_PRIVATE[name]] = value
            elif row is not None and row.torchair:
                written[row.torchair] = not value if row.inverted else value
            else:
                raise OptionValueError(
                    f"option {name!r} is this backend's own; TorchAir, in its mode, has none like it"
                )
        return written


class _OptionGroup:
    """A branch of the tree, such as `config.debug.graph_dump`: a path and the config it belongs to, no state."""

    __slots__ = ("_config", "_path")

    def __init__(self, config: CompilerConfig, path: str) -> None:
        object.__setattr__(self, "_config", config)
        object.__setattr__(self, "_path", path)

    def __getattr__(self, name: str) -> Any:
        return _get(self._config, f"{self._path}.{name}")

    def __setattr__(self, name: str, value: object) -> None:
        _set(self._config, f"{self._path}.{name}", value)

    def __dir__(self) -> list[str]:
        if self._path == _FLAT[:-1]:
            return sorted({*OPTION_TABLE, *_PRIVATE})
        return sorted(
            path.removeprefix(f"{self._path}.").split(".")[0] for path in _PATHS if path.startswith(self._path)
        )

    def __repr__(self) -> str:
        return f"<CompilerConfig section {self._path}: {', '.join(dir(self))}>"


def given_or_default(config: object, taker: str) -> CompilerConfig:
    """The config that ``taker`` was given, itself, or a new one for None.

    Raises:
        OptionValueError: it is something else, a dict of options say.
    """
    if config is None:
        return CompilerConfig()
    if not isinstance(config, CompilerConfig):
        raise OptionValueError(
            f"{taker} takes a CompilerConfig, got {config!r} ({type(config).__name__}); options by flat name are given "
            "as options={...}, to torch.compile, compile_fx, explain and cache_compile"
        )
    return config


def apply_flat(config: CompilerConfig, options: Mapping[str, object]) -> None:
    """Set options by their flat names, all or none of them.

    Raises:
        OptionError: As `Options.from_mapping`; then `config` is unchanged.
    """
    Options.from_mapping(options)
    config._values.update(options)  # noqa: SLF001 - this module is the class's own


def _get(config: CompilerConfig, path: str) -> Any:
    values: dict[str, object] = object.__getattribute__(config, "_values")
    if path in _SECTIONS:
        return _OptionGroup(config, path)
    path = path.removeprefix(_FLAT)
    setting = PRIVATE_SETTINGS.get(_PRIVATE.get(path, path))
    if setting is not None:
        return values.get(setting[0], setting[1])
    if path in GE_SETTINGS:
        return values.get(path, GE_SETTINGS[path][0])
    row = _row_at(path)
    if row is not None:
        value = values.get(row.name, row.default)
        return not value if _is_inverted(row, path) else value
    if path in values:
        return values[path]
    raise AttributeError(_no_such(path))


def _set(config: CompilerConfig, path: str, value: object) -> None:
    values: dict[str, object] = object.__getattribute__(config, "_values")
    path = path.removeprefix(_FLAT)
    row = _row_at(path)
    if row is not None:
        inverted = _is_inverted(row, path)
        if inverted and isinstance(value, bool):
            # Judged as the flat option that it is; the message keeps the user's spelling and value where it can.
            value = not value
        row.check(value, said_as=f"{path} (flat name {row.name}, the opposite)" if inverted else path)
        values[row.name] = value
    elif path in GE_SETTINGS:
        default, kind = GE_SETTINGS[path]
        Option(name=path, kind=kind, default=default, meaning="").check(value)
        values[path] = value
        if values.get("mode") != "max-autotune":
            logger.warning("%s is a setting of %s; it has no effect on this backend", path, reader_of(path))
    elif path in PRIVATE_SETTINGS:
        name, default, kind = PRIVATE_SETTINGS[path]
        Option(name=path, kind=kind, default=default, meaning="").check(value)
        values[name] = value
    elif path.startswith(PRIVATE_PREFIX):
        values[path] = value
    else:
        raise unknown_option(path, {*OPTION_TABLE, *_PATHS})


def _row_at(path: str) -> Option | None:
    """Find the option that a TorchAir path or a flat name stands for."""
    return OPTION_TABLE.get(path) or _BY_PATH.get(path)


def _is_inverted(row: Option, path: str) -> bool:
    return row.inverted and path == row.torchair


def _no_such(path: str) -> str:
    return str(unknown_option(path, {*OPTION_TABLE, *_PATHS}))
