// Tokens a second of one stream of llama.cpp, after the prompt is read. Arguments: the folder where node-llama-cpp is
// installed, a GGUF file, threads, tokens to make, and the prompt's ids as JSON.
const [folder, file, threads, wanted, prompt] = process.argv.slice(2);
const {getLlama} = await import(`${folder}/node_modules/node-llama-cpp/dist/index.js`);
const llama = await getLlama({gpu: false, build: "never", maxThreads: Number(threads)});
const model = await llama.loadModel({modelPath: file});
const context = await model.createContext({contextSize: 256, threads: Number(threads)});
let count = 0, begun = 0;
for await (const _ of context.getSequence().evaluate(JSON.parse(prompt), {temperature: 0, yieldEogToken: true})) {
    if (++count === 1) begun = performance.now();
    if (count === Number(wanted)) break;
}
console.log((Number(wanted) - 1) / (performance.now() - begun) * 1000);
process.exit(0);
