// Runs before the page is drawn, so that a chosen theme does not flash in late.
try {
  const theme = localStorage.getItem("theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch { /* this browser keeps nothing */ }
