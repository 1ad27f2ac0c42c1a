"""Checks an item again: `python -m npugraph_ex_conformance.campaign.again KIND/NUMBER`, with the choices of a steered one."""

from __future__ import annotations

import sys
from contextlib import ExitStack

from npugraph_ex_conformance.campaign.child import start
from npugraph_ex_conformance.campaign.kinds import kind_named
from npugraph_ex_conformance.items import CampaignSettings
from npugraph_ex_conformance.steering.kind import again
from npugraph_ex_conformance.words import words


def main(label: str, seed: str = "0") -> int:
    """Say what is wrong and print the script that shows it; 1 if anything is wrong."""
    settings = CampaignSettings(seed=int(seed))
    with ExitStack() as stack:
        start(settings, stack)
        message, script = again(settings, label, kind_named)
    sys.stdout.write(f"{message or 'nothing is wrong'}\n{script}")
    return 1 if message else 0


if __name__ == "__main__":
    example = ("example", "as a campaign names it: KIND/NUMBER, with the choices of a steered one")
    given = words("npugraph_ex_conformance.campaign.again", __doc__, example, seed=("0", "the seed of the campaign"))
    sys.exit(main(*given))
