"""The package of patches that scripts import before they compile; each module says what became of its patch."""
