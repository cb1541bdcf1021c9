// Browsers start no workers from a disk, and the search is one: there it runs in a hidden frame. The theme's own remedy
// is a script from the network.
if (location.protocol === "file:")
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.document.open();
      this.inside.document.write("<body></body>");
      this.inside.document.close();
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = this.inside.document.createElement("script");
      this.ready = new Promise((resolve) => (script.onload = resolve));
      script.src = url;
      this.inside.document.body.append(script);
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
