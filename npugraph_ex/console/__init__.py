"""What commands and the suite's runs share on a console: how far they are, and how they end at Ctrl-C."""
