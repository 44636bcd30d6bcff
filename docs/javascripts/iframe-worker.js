// From the file system, browsers refuse to start a Worker, and the search runs in one. There, an iframe that nobody sees
// takes its place. The offline plugin would fetch a script for this from another site unless a file of this name is
// among the polyfills of mkdocs.yml.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.title = "search"
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      inside.document.open() // or a browser would replace the empty document once it has loaded it
      inside.document.write("<!doctype html><html lang=en><title>search</title><body></body></html>")
      inside.document.close()
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = inside.document.createElement("script")
      this.ready = new Promise((resolve, reject) => {
        script.onload = resolve
        script.onerror = reject
      })
      script.src = new URL(url, location)
      inside.document.body.append(script)
    }

    postMessage(data) {
      this.ready.then(() => {
        const inside = this.frame.contentWindow
        inside.dispatchEvent(new inside.MessageEvent("message", { data }))
      })
    }

    terminate() {
      this.frame.remove()
    }
  }
}
