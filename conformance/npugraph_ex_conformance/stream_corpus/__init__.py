"""Stream graphs with a mistake, and mended: what documents a trap, or what random graphs do not draw."""
