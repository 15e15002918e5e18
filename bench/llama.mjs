// Prints the tokens/s of one stream of llama.cpp while decoding. Arguments: the folder where node-llama-cpp is installed,
// a GGUF file, the number of threads, the number of tokens to generate, and the ids of the prompt as JSON.
const [folder, file, threads, tokens, prompt] = process.argv.slice(2);
const {getLlama} = await import(`${folder}/node_modules/node-llama-cpp/dist/index.js`);
const llama = await getLlama({gpu: false, build: "never", maxThreads: Number(threads)});
const model = await llama.loadModel({modelPath: file});
const context = await model.createContext({contextSize: 256, threads: Number(threads)});
let count = 0;
let started = 0;
for await (const _ of context.getSequence().evaluate(JSON.parse(prompt), {temperature: 0, yieldEogToken: true})) {
    count += 1;
    if (count === 1) started = performance.now();
    if (count === Number(tokens)) break;
}
console.log((Number(tokens) - 1) / (performance.now() - started) * 1000);
process.exit(0);
