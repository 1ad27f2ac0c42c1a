"""The import path that kinds of others were written with; the names are those of `npugraph_ex_conformance.items`."""

from npugraph_ex_conformance.items import CampaignSettings, ItemAnswer, ItemKind

__all__ = ["CampaignSettings", "ItemAnswer", "ItemKind"]
