// Prints the answers of a built site's search, as JSON: node ask.js SITE QUESTIONS, where QUESTIONS is a list as JSON.
const fs = require("fs");
const [site, questions] = process.argv.slice(2);
globalThis.window = globalThis;
const page = { getElementById: () => null };
Object.assign(globalThis, { _ready: () => {}, _: (text) => text, SPHINX_HIGHLIGHT_ENABLED: false, document: page });
const files = ["_static/language_data.js", "_static/searchtools.js", "searchindex.js"];
const code = files.map((name) => fs.readFileSync(`${site}/${name}`, "utf8")).join(";");
const search = (0, eval)(`${code}; (text) => Search._performSearch(...Search._parseQuery(text)).reverse()`);
const ask = (text) => {
  window.location = { search: `?q=${encodeURIComponent(text)}` };
  return search(text).map(([name, , anchor]) => name + anchor);
};
console.log(JSON.stringify(JSON.parse(questions).map(ask)));
