"""`junit.xml`, written from the books: a resumed run has every test in it, whichever process ran it and when."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence

from npugraph_ex_conformance.results import Finished

# XML 1.0 has no way to write these characters, not even escaped.
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_SKIPPED = {"skipped": "pytest.skip", "xfailed": "pytest.xfail"}


def junit(finished: Sequence[Finished]) -> str:
    """The text of the file.

    Args:
        finished: every test with its result.
    """
    counts = {
        "tests": len(finished),
        "failures": sum(test.outcome == "failed" for test in finished),
        "errors": 0,
        "skipped": sum(test.outcome in _SKIPPED for test in finished),
    }
    root = ET.Element("testsuites", name="conformance")
    seconds = f"{sum(test.seconds for test in finished):.2f}"
    suite = ET.SubElement(root, "testsuite", name="conformance", time=seconds)
    for what, number in counts.items():
        suite.set(what, str(number))
    for test in finished:
        file, _, name = test.test.partition("::")
        module = file.removesuffix(".py").replace("/", ".")
        case = ET.SubElement(suite, "testcase", classname=module, name=_clean(name), time=f"{test.seconds:.2f}")
        if test.outcome == "failed":
            message = test.failure.message if test.failure is not None else test.text.partition("\n")[0]
            ET.SubElement(case, "failure", message=_clean(message)).text = _clean(test.text)
        elif test.outcome in _SKIPPED:
            ET.SubElement(case, "skipped", type=_SKIPPED[test.outcome], message=_clean(test.text))
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _clean(text: str) -> str:
    return _NOT_IN_XML.sub("�", text)
