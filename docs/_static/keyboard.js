// What is wider than a narrow screen scrolls by itself; the keyboard can reach it, too.
addEventListener("load", () =>
  document.querySelectorAll("article pre, article .table-wrapper").forEach((part) => {
    if (part.scrollWidth > part.clientWidth) part.tabIndex = 0;
  }));
