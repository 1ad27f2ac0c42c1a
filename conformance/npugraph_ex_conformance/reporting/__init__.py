"""What a run looks like on its page: programs and histograms as SVG, work on the modelled clock."""
