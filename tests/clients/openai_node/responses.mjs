// OpenAI's own package for Node, unchanged, against two routers: node responses.mjs http://HOST:PORT/v1 http://HOST:PORT/v1
// Reads a response through the first router, and after 20 events goes on through the second. Prints what it got, as JSON.
import OpenAI from 'openai';

const [first, second] = process.argv.slice(2).map((baseURL) => new OpenAI({ baseURL, apiKey: 'none', maxRetries: 0 }));
const asked = { model: 'fake', input: 'Hi', temperature: 0, max_output_tokens: 200 };

const events = [];
for await (const event of await first.responses.create({ ...asked, stream: true, background: true })) {
  events.push(event);
  if (events.length === 20) break; // the package closes the connection
}
const id = events[0].response.id;
const after = events.at(-1).sequence_number;
for await (const event of await second.responses.retrieve(id, { stream: true, starting_after: after })) events.push(event);

const again = await second.responses.retrieve(id);
const whole = await first.responses.create(asked);
const next = await second.responses.create({ ...asked, input: 'And?', previous_response_id: id });
const items = await first.responses.inputItems.list(next.id);
await first.responses.delete(id);
let gone = null;
try {
  await second.responses.retrieve(id);
} catch (error) {
  gone = [error.constructor.name, error.status, error.code];
}
const numbers = events.map((event) => event.sequence_number);
const text = events.filter((event) => event.type === 'response.output_text.delta').map((event) => event.delta).join('');
console.log(JSON.stringify({
  numbers, text, last: events.at(-1).type, again: again.output_text, whole: whole.output_text, status: again.status,
  input: items.data.map((item) => item.content[0].text), next: next.previous_response_id === id, gone,
}));
