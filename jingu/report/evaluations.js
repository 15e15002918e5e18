// Shows the documents that contain the words and have the chosen state.
for (const section of document.querySelectorAll("section[data-task]")) {
  const search = section.querySelector("input"), state = section.querySelector("select"), count = section.querySelector("output");
  const documents = [...section.querySelectorAll("details")].map((node) => [node, node.textContent.toLowerCase()]);
  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const [node, text] of documents) {
      node.hidden = !(words.every((word) => text.includes(word)) && (!state.value || node.className.split(" ").includes(state.value)));
      shown += !node.hidden;
    }
    count.textContent = shown.toLocaleString("en") + " shown";
  };
  search.addEventListener("input", filter);
  state.addEventListener("change", filter);
  filter();
}
