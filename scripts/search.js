// Appended to the theme's search worker. The theme's own ranking adds up whatever any word of a query finds, and a word
// in a title outweighs all others, even "of" and "a". Here a query of several words ranks sections by all of its words:
// how many of them a section has, how rare they are, and whether its title or its page's title has them. A query of one
// word, and one with quotes or operators, is ranked as before.
{
  const sections = new Map() // by location: what the index was made of
  addEventListener("message", event => {
    if (event.data.type === 0) {
      for (const each of event.data.data.docs) {
        const words = each.text.replace(/<[^>]*>/g, " ").split(/\s+/).length
        sections.set(each.location, { words, boost: each.boost || 1, page: each.location.split("#")[0] })
      }
    }
  })

  const ENDINGS = /(?:ingly|ings?|edly|ed|ions?|ers?|ies|es|s|e|y)$/
  const stems = new Map()
  const stem = word => {
    if (!stems.has(word)) {
      const cut = word.replace(ENDINGS, "")
      const short = cut.length < 3 ? word : cut.replace(/([bdgmnprt])\1$/, "$1") // "stopped" is found by "stop"
      stems.set(word, short)
    }
    return stems.get(word)
  }

  // For each section, how strongly each field has the word, and where, as the theme marks it.
  const find = (index, word, typing) => {
    const found = new Map()
    for (const term of Object.keys(index.invertedIndex)) {
      const weight = term === word ? 1 : stem(term) === stem(word) ? 0.9 : typing && term.startsWith(word) ? 0.6 : 0
      if (!weight) continue
      for (const field of index.fields) {
        for (const [location, { position }] of Object.entries(index.invertedIndex[term][field])) {
          if (!found.has(location)) found.set(location, { title: 0, text: 0, tags: 0, places: {} })
          const here = found.get(location)
          here[field] += weight * (field === "text" ? position.length : 1)
          here.places[field] = { position: [...here.places[field]?.position ?? [], ...position] }
        }
      }
    }
    return found
  }

  const rank = (index, words) => {
    const hits = words.map((word, i) => find(index, word, i === words.length - 1))
    const rarity = hits.map(hit => Math.log(1 + sections.size / (1 + hit.size)))
    const all = rarity.reduce((sum, each) => sum + each, 0)
    const results = []
    for (const [location, { words: length, boost, page }] of sections) {
      let score = 0
      let covered = 0
      let matched = 0
      const metadata = {}
      hits.forEach((hit, i) => {
        const here = hit.get(location)
        const above = location === page ? undefined : hit.get(page) // the title and the tags of the page
        if (here) {
          metadata[words[i]] = here.places
          matched += 1
        }
        const text = here ? here.text / (here.text + 0.5 + length / 150) : 0
        const title = Math.min(1, here?.title ?? 0)
        const about = Math.min(1, (above?.title ?? 0) + (above?.tags ?? 0) + (here?.tags ?? 0))
        score += rarity[i] * (text + 1.5 * title + about)
        covered += rarity[i] * (here ? 1 : about ? 0.7 : 0)
      })
      if (!matched) continue
      const share = matched / words.length
      const theirs = 1 + ((location === page) + share) ** 2 // what the theme multiplies this with
      results.push({ ref: location, score: boost * score * (covered / all) ** 2 / theirs, matchData: { metadata } })
    }
    return results
  }

  const search = lunr.Index.prototype.search
  lunr.Index.prototype.search = function (query) {
    const typed = query.split(" ")
    if (typed.some(word => !/^[^\s+\-:~^*"]+\*$/.test(word))) return search.call(this, query)
    const words = [...new Set(typed.map(word => word.slice(0, -1).toLowerCase()))].filter(lunr.stopWordFilter)
    return words.length > 1 && sections.size ? rank(this, words) : search.call(this, query)
  }
}
