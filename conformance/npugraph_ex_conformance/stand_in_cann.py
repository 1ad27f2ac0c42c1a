"""A stand-in for CANN's `op_compiler`: a shell script that behaves, waits, fails, hangs or writes rubbish, as it is told."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

_COMPILER = """#!/bin/sh
echo "$$ $*" >> "{home}/calls"
does=$(cat "{home}/does")
while [ $# -gt 0 ]; do case $1 in -p) from=$2;; -o) into=$2;; esac; shift 2; done
cp -r "$from" "{home}/compiled/$$"
package="$into/static_kernel_$$.run"
case $does in
  behave) ;;
  wait) while [ ! -e "{home}/go" ]; do sleep 0.05; done;;
  fail) echo "E10001: no such operator" >&2; exit 3;;
  hang) sleep 600 & sleep 600; exit 0;;
  nothing) exit 0;;
  rubbish) head -c 200 /dev/urandom > "$package"; exit 0;;
  broken) printf '#!/bin/sh\\necho archive damaged; exit 1\\n' > "$package"; exit 0;;
  empty) printf '#!/bin/sh\\nexit 0\\n' > "$package"; exit 0;;
esac
cat > "$package" <<'PACKAGE'
#!/bin/sh
echo "$0 $*" >> "{home}/installs"
name=$(basename "$0" .run)
case "$1" in
  --install-path=*) mkdir -p "${{1#--install-path=}}/$name";;
  *) folder="{home}/opp/static_kernel/ai_core/$name"; mkdir -p "$folder"
     printf '#!/bin/sh\\nrm -r "$(dirname "$0")"\\n' > "$folder/uninstall.sh"; chmod +x "$folder/uninstall.sh";;
esac
PACKAGE
"""


def end_of_process() -> None:
    """Do what happens to static kernels when a process ends."""
    from npugraph_ex.aclgraph.static_kernels import lease

    for held in list(lease._leases.values()):
        held.close()


@dataclass(frozen=True)
class StandInCann:
    """An installation of CANN as far as static kernels need one.

    Attributes:
        home: what ASCEND_HOME_PATH names.
    """

    home: Path

    @classmethod
    def at(cls, home: Path) -> StandInCann:
        """Put one there."""
        (home / "bin").mkdir(parents=True)
        (home / "compiled").mkdir()
        compiler = home / "bin" / "op_compiler"
        compiler.write_text(_COMPILER.format(home=home))
        compiler.chmod(0o755)
        made = cls(home)
        made.does("behave")
        return made

    def does(self, what: str) -> None:
        """From now on the compiler does this."""
        (self.home / "does").write_text(what)

    def calls(self) -> list[list[str]]:
        """The command lines that the compiler got, with its process id first."""
        return [line.split() for line in self._lines("calls")]

    def installs(self) -> list[str]:
        """The packages that were told to install themselves, with their arguments."""
        return self._lines("installs")

    def packages(self) -> list[str]:
        """The packages in CANN's own folder."""
        return sorted(path.name for path in (self.home / "opp" / "static_kernel" / "ai_core").glob("*"))

    def compiled(self) -> list[set[tuple[str, tuple[tuple[int, ...], ...]]]]:
        """For each call of the compiler, the operators it was given and the shapes of their inputs."""
        return [
            {
                (said["op_type"], tuple(tuple(tensor["shape"]) for tensor in said["inputs"]))
                for said in (json.loads(file.read_text()) for file in (self.home / "compiled" / call[0]).iterdir())
            }
            for call in self.calls()
        ]

    def _lines(self, name: str) -> list[str]:
        file = self.home / name
        return file.read_text().splitlines() if file.exists() else []
