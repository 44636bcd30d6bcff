// A table that is wider than the page scrolls; with this the keyboard can scroll it too. The theme wraps tables late.
addEventListener("load", () => {
  const fit = wrap => {
    if (wrap.scrollWidth > wrap.clientWidth) {
      wrap.tabIndex = 0
      wrap.setAttribute("role", "group")
      wrap.setAttribute("aria-label", "Table")
    } else {
      for (const name of ["tabindex", "role", "aria-label"]) wrap.removeAttribute(name)
    }
  }
  const sizes = new ResizeObserver(entries => entries.forEach(entry => fit(entry.target)))
  document.querySelectorAll(".md-typeset__scrollwrap").forEach(wrap => sizes.observe(wrap))
})
