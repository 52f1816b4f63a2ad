// OpenAI's own package for Node, unchanged: node unbroken.mjs TOKENS http://HOST:PORT/v1 …
// Reads one response through all routers in turn, and goes on after the last number where its stream breaks. Prints each
// event as a line of JSON, and at last how often the stream broke.
import OpenAI from 'openai';

const [tokens, ...bases] = process.argv.slice(2);
const clients = bases.map((baseURL) => new OpenAI({ baseURL, apiKey: 'none', maxRetries: 0, timeout: 10_000 }));
const asked = {
  model: 'fake', input: 'Hi', temperature: 0, max_output_tokens: Number(tokens), background: true, stream: true,
};
const events = [];
let turn = 0;
let breaks = 0;

async function open() {
  const client = clients[turn++ % clients.length];
  if (!events.length) return client.responses.create(asked);
  return client.responses.retrieve(events[0].response.id, { stream: true, starting_after: events.at(-1).sequence_number });
}

const ended = () => /^response\.(completed|incomplete|failed)$/.test(events.at(-1)?.type);
while (!ended()) {
  try {
    for await (const event of await open()) {
      events.push(event);
      console.log(JSON.stringify(event));
    }
  } catch { // the router is dead, or has met no worker yet
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  if (events.length && !ended()) breaks += 1;
}
console.log(JSON.stringify({ breaks }));
