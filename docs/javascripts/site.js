// A table or a block of code that is wider than the page scrolls. With this the keyboard can scroll it too, and the
// stylesheet knows on which sides there is more (`data-more`).
addEventListener("load", () => { // the theme has put each table into what scrolls
  const fit = element => {
    const table = element.matches(".md-typeset__scrollwrap")
    if (element.scrollWidth > element.clientWidth) {
      element.tabIndex = 0
      if (table) {
        element.setAttribute("role", "group")
        element.setAttribute("aria-label", "Table")
      }
    } else if (table) {
      for (const name of ["tabindex", "role", "aria-label"]) element.removeAttribute(name)
    }
  }
  const more = element => {
    const left = element.scrollLeft > 1
    const right = element.scrollLeft + element.clientWidth < element.scrollWidth - 1
    const sides = [left && "left", right && "right"].filter(side => side).join(" ")
    sides ? element.dataset.more = sides : delete element.dataset.more
  }
  const sizes = new ResizeObserver(entries => entries.forEach(entry => {
    fit(entry.target)
    more(entry.target)
  }))
  document.querySelectorAll(".md-typeset__scrollwrap, pre > code").forEach(element => {
    sizes.observe(element)
    element.addEventListener("scroll", () => more(element), { passive: true })
  })

  // The theme follows the system's scheme without choosing it in its own switch, so that the keyboard's focus would be
  // on the half of the switch that is hidden.
  for (const option of document.querySelectorAll(".md-option")) {
    option.checked = option.dataset.mdColorScheme === document.body.dataset.mdColorScheme
  }
})

// Where there is no page, the words of its address may find another.
const lost = document.getElementById("not-found-search")
if (lost) {
  const words = decodeURIComponent(location.pathname).replace(/\.html?$/, "").split(/[^A-Za-z0-9]+/).filter(word => word)
  const query = words.slice(-3).join(" ")
  if (query) {
    const link = document.createElement("a")
    link.href = `?q=${encodeURIComponent(query)}`
    link.textContent = `Search for “${query}”`
    lost.append(link, ".")
  }
}

// Pictures that move play once, when they come into view, with a button to pause and to play again.
const play = picture => {
  const button = document.createElement("button")
  button.type = "button"
  button.className = "md-button picture-button"
  const running = state => {
    picture.dataset.plays = state ? "running" : "paused"
    button.textContent = state ? "Pause" : "Go on"
  }
  const begin = () => {
    delete picture.dataset.plays
    picture.getBoundingClientRect() // or the browser would see no change, and go on from the end
    running(true)
    Promise.all(picture.getAnimations({ subtree: true }).map(animation => animation.finished)).then(() => {
      delete picture.dataset.plays
      button.textContent = "Play again"
    }, () => {}) // it began anew, or nothing is to move any more
  }
  button.addEventListener("click", () => picture.dataset.plays ? running(picture.dataset.plays === "paused") : begin())
  button.textContent = "Play"
  picture.after(button)
  new IntersectionObserver((entries, observer) => {
    if (entries.some(entry => entry.isIntersecting)) {
      observer.disconnect()
      begin()
    }
  }, { threshold: 0.6 }).observe(picture)
}
if (matchMedia("(prefers-reduced-motion: no-preference)").matches) {
  for (const picture of document.querySelectorAll("svg.picture")) {
    if (picture.querySelector(".appears")) play(picture)
  }
}
