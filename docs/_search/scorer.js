// Sphinx's weights, and `score`, which orders the answers: pages that say how to do something before those that list, and titles with
// words of the question before those without.
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  score: ([page, title, , , score]) => {
    const question = new URLSearchParams(window.location.search).get("q") || "";
    const words = question.toLowerCase().match(/[a-z0-9_]{3,}/g) || [];
    const named = words.filter((word) => title.toLowerCase().includes(word)).length;
    const guides = /^(install|tutorial|faq|how-to\/)/.test(page) ? 1 : 0;
    const lists = /changelog|contributing|release|upstream|mutants|returned-objects|examples/.test(page) ? 4 : 0;
    return score + 2 * named + guides - lists;
  },
};
