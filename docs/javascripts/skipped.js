// The picture of the steps that run (docs/pictures/skipped.svg): with this, one sets the lengths, `chunk` and `compact`.

// How many rows there may be in a tier: `spread_tiers` in treescan/_rows/compact.py.
const tiersOf = rows => [...new Set([16, 4, 2, 1].map(part => Math.ceil(rows / part)))]

// Of each chunk: its number of steps, and the rows that it runs on. A chunk runs if a row has a step in it; with
// `compact`, it runs on the smallest tier that holds these rows, but steps that are left over run on all rows.
const rowsThatRun = (lengths, steps, chunk, compact) => {
  const size = Math.min(chunk, steps)
  const every = lengths.map((_, row) => row)
  const chunks = []
  for (let begin = 0; begin < steps; begin += size) {
    const long = Math.min(size, steps - begin)
    const live = every.filter(row => lengths[row] > begin)
    const idle = every.filter(row => lengths[row] <= begin)
    const tiers = compact && long === size ? tiersOf(lengths.length) : [lengths.length]
    const count = live.length ? tiers.find(tier => tier >= live.length) : 0
    chunks.push([long, [...live, ...idle].slice(0, count).sort((one, other) => one - other)])
  }
  return chunks
}

// What is in the picture after its name and its description, as scripts/draw_padding.py draws it.
const drawSkipped = (lengths, steps, chunk, compact) => {
  const width = 400, from = 36, cell = 22, tall = 27, over = 58
  const chunks = rowsThatRun(lengths, steps, chunk, compact)
  const sum = numbers => numbers.reduce((one, other) => one + other, 0)
  const every = lengths.length * steps, data = sum(lengths)
  const runs = sum(chunks.map(([long, ran]) => long * ran.length))
  const under = over + lengths.length * tall, bar = under + 36, legend = under + 78
  const drawn = []
  const g = value => String(Number(value.toPrecision(6)))
  const box = (x, y, wide, high, kind, round) => drawn.push(
    `<rect class="${kind}" x="${g(x)}" y="${g(y)}" width="${g(wide)}" height="${g(high)}"${round ? ` rx="${round}"` : ""}/>`,
  )
  const text = (x, y, says, kind, anchor) => drawn.push(
    `<text${kind ? ` class="${kind}"` : ""} x="${g(x)}" y="${g(y)}"${anchor ? ` text-anchor="${anchor}"` : ""}>${says}</text>`,
  )
  const line = x => drawn.push(`<polyline class="line" points="${x},${over - 2} ${x},${under + 20}"/>`)
  text(0, 16, `chunk=${chunk}${compact ? ", compact=True" : ""}`, "code")
  text(width, 16, `${Math.round(100 * runs / every)} % run: ${runs} of ${every} steps`, "", "end")
  text(from - 6, over - 8, "row", "small", "end")
  for (let step = 0; step < steps; step += 4) text(from + step * cell + 2, over - 8, step ? step : "step 0", "small")
  lengths.forEach((length, row) => {
    const y = over + row * tall
    text(from - 10, y + 18, row, "small", "end")
    let step = 0
    for (const [long, ran] of chunks) {
      for (const end = step + long; step < end; step++) {
        const kind = step < length ? "data" : ran.includes(row) ? "padding" : "absent"
        box(from + step * cell + 2, y + 3, cell - 4, tall - 6, kind, 2)
      }
    }
  })
  text(from - 6, under + 17, "rows", "small", "end")
  let begin = 0
  for (const [long, ran] of chunks) {
    line(from + begin * cell)
    text(from + begin * cell + long * cell / 2, under + 17, ran.length, "small", "middle")
    begin += long
  }
  line(from + begin * cell)
  let x = 1
  for (const [kind, count] of [["data", data], ["padding", runs - data], ["absent", every - runs]]) {
    if (!count) continue
    const wide = count * (width - 2) / every
    box(x, bar, wide, 16, kind, 0)
    x += wide
  }
  for (const [x, kind, says] of [
    [0, "data", `data: ${data}`],
    [104, "padding", `padding that runs: ${runs - data}`],
    [290, "absent", `not run: ${every - runs}`],
  ]) {
    box(x + 1, legend - 13, 18, 16, kind, 2)
    text(x + 26, legend, says, "small")
  }
  const described = `${lengths.length} rows of lengths ${lengths.join(", ")} in ${steps} steps, chunk=${chunk}${
    compact ? ", compact=True" : ""}. The chunks run on ${chunks.map(([, ran]) => ran.length).join(", ")} rows. ${
    runs} of ${every} steps run, and ${data} of these are data.`
  return { drawn: drawn.join("\n"), described }
}

const trySkipped = picture => {
  const steps = 16, lengths = [6, 3, 11, 1, 4, 7, 2, 0]
  const [name, description] = picture.children
  const element = (tag, properties) => Object.assign(document.createElement(tag), properties)
  const slider = (min, max, value) => element("input", { type: "range", min, max, value })
  const stage = element("div", { className: "picture-stage" })
  picture.replaceWith(stage)
  stage.append(picture)
  const handles = lengths.map((length, row) => {
    const handle = slider(0, steps, length)
    handle.style.setProperty("--row", row)
    handle.setAttribute("aria-label", `Length of row ${row}`)
    stage.append(handle)
    return handle
  })
  const controls = element("div", { className: "picture-controls" })
  const chunk = slider(1, steps, 4), compact = element("input", { type: "checkbox" })
  const hint = "Drag the end of a row, or move it with the arrow keys."
  const says = element("output", { className: "picture-says" })
  for (const [control, code] of [[chunk, "chunk"], [compact, "compact"]]) {
    const label = element("label")
    label.append(element("code", { textContent: code }), control)
    controls.append(label)
  }
  stage.after(controls)
  controls.append(element("p", { textContent: hint }), says)
  const draw = () => {
    const now = handles.map(handle => Number(handle.value))
    const { drawn, described } = drawSkipped(now, steps, Number(chunk.value), compact.checked)
    description.textContent = described
    picture.innerHTML = `${name.outerHTML}\n${description.outerHTML}\n${drawn}\n`
    says.textContent = described
  }
  for (const control of [...handles, chunk, compact]) control.addEventListener("input", draw)
}

for (const picture of document.querySelectorAll('svg.picture[aria-labelledby="skipped-title"]')) trySkipped(picture)
