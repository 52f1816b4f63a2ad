// Anthropic's own package for Node: messages, a stream, a tool that must be called and its answer, a schema, counts, errors.
import Anthropic from '@anthropic-ai/sdk';
import { model, router, run } from './cases.mjs';

const client = new Anthropic({ baseURL: router, apiKey: 'none', maxRetries: 9 });
const asked = (content, max_tokens = 40) => ({ model, max_tokens, temperature: 0, messages: [{ role: 'user', content }] });
const story = asked('Tell me a story of the sea.');
const city = { type: 'object', properties: { city: { enum: ['Oslo', 'Rome'] } }, required: ['city'] };
const person = {
  type: 'object', properties: { name: { type: 'string' }, age: { type: 'integer' } }, required: ['name', 'age'], additionalProperties: false,
};
const textOf = (message) => message.content.map((block) => block.text ?? '').join('');

await run({
  async message() {
    const answer = await client.messages.create(story);
    return [textOf(answer), answer.stop_reason, answer.usage.output_tokens];
  },
  async stream() {
    const stream = client.messages.stream({ ...story, max_tokens: 100 });
    let text = '';
    stream.on('text', (piece) => (text += piece));
    const final = await stream.finalMessage();
    if (textOf(final) !== text) throw new Error('the parts are not the whole');
    return [text, final.stop_reason, final.usage.output_tokens];
  },
  async tools() {
    const question = asked('How is the weather in Oslo?', 100);
    const tools = [{ name: 'weather', description: 'The weather of a city', input_schema: city }];
    const called = await client.messages.create({ ...question, tools, tool_choice: { type: 'any' } });
    const uses = called.content.filter((block) => block.type === 'tool_use');
    if (!uses.length || uses.some((use) => !['Oslo', 'Rome'].includes(use.input.city))) throw new Error(JSON.stringify(called));
    const results = uses.map((use) => ({ type: 'tool_result', tool_use_id: use.id, content: 'rain' }));
    const messages = [...question.messages, { role: 'assistant', content: called.content }, { role: 'user', content: results }];
    const answer = await client.messages.create({ ...question, messages, tools, tool_choice: { type: 'none' } });
    return [uses.map((use) => use.input), textOf(answer)];
  },
  async schema() {
    const format = { type: 'json_schema', schema: person };
    const made = JSON.parse(textOf(await client.messages.create({ ...asked('Invent a person.', 100), output_config: { format } })));
    if (typeof made.name !== 'string' || !Number.isInteger(made.age)) throw new Error(JSON.stringify(made));
    return made;
  },
  count: async () => (await client.messages.countTokens({ model, messages: story.messages })).input_tokens,
  async errors() {
    try {
      return await client.messages.create({ ...story, model: 'claude-9' });
    } catch (error) {
      return [error.constructor.name, error.status];
    }
  },
});
