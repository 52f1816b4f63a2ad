// OpenAI's own package for Node, unchanged, against a router: node client.mjs http://HOST:PORT/v1
// Prints one line of JSON: what it got.
import OpenAI from 'openai';

const client = new OpenAI({ baseURL: process.argv[2], apiKey: 'none', maxRetries: 0 });
const asked = { model: 'fake', prompt: [1, 2, 3], temperature: 0, max_tokens: 24 };

const whole = await client.completions.create(asked);

let text = '', usage = null, id = null;
for await (const chunk of await client.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } })) {
  id = chunk.id;
  text += chunk.choices.map((choice) => choice.text).join('');
  usage = chunk.usage ?? usage;
}

const left = await client.completions.create({ ...asked, max_tokens: 4000, stream: true });
let leftId = null;
for await (const chunk of left) {
  leftId = chunk.id;
  break; // the package closes the connection
}

const errors = [];
for (const attempt of [
  () => client.completions.create({ ...asked, temperature: 11 }),
  () => client.chat.completions.create({ model: 'gpt-5', messages: [{ role: 'user', content: 'Hi' }] }),
]) {
  try {
    await attempt();
  } catch (error) {
    errors.push([error.constructor.name, error.status, error.code, error.param]);
  }
}

const models = [];
for await (const model of client.models.list()) models.push(model.id);

console.log(JSON.stringify({ whole: whole.choices[0].text, requestId: whole._request_id, wholeId: whole.id, text, usage, id, leftId, errors, models }));
