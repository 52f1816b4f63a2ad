// The AI SDK of Vercel: texts, streams, objects and tools, by @ai-sdk/openai (responses and chats) and @ai-sdk/openai-compatible.
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { embedMany, generateObject, generateText, Output, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';
import { base, joined, model, run } from './cases.mjs';

const openai = createOpenAI({ baseURL: base, apiKey: 'none' });
const compatible = createOpenAICompatible({ name: 'octavo', baseURL: base, supportsStructuredOutputs: true });
const models = { responses: openai(model), chat: openai.chat(model), compatible: compatible(model) };
const person = z.object({ name: z.string(), age: z.number().int(), mood: z.enum(['calm', 'merry']) });
const who = 'Invent a person with a name, an age and a mood. Answer in JSON.';
const even = { temperature: 0, maxRetries: 9 };
const weather = tool({
  description: 'The weather of a city',
  inputSchema: z.object({ city: z.enum(['Oslo', 'Rome']) }),
  execute: async ({ city }) => `rain in ${city}`,
});
const rethrow = ({ error }) => {
  throw error;
};

const cases = {};
for (const [kind, of] of Object.entries(models)) {
  const asked = { ...even, model: of };
  cases[`${kind}_text`] = async () => {
    const { text, finishReason, usage } = await generateText({ ...asked, prompt: 'Tell me a story of the sea.', maxOutputTokens: 32 });
    return [text, finishReason, usage.outputTokens];
  };
  cases[`${kind}_stream`] = async () =>
    joined(streamText({ ...asked, prompt: 'Tell me a story of the sea.', maxOutputTokens: 100, onError: rethrow }).textStream);
  cases[`${kind}_object`] = async () => (await generateObject({ ...asked, schema: person, prompt: who })).object;
  cases[`${kind}_object_stream`] = async () => {
    const result = streamText({ ...asked, output: Output.object({ schema: person }), prompt: who, onError: rethrow });
    let last = null;
    for await (const part of result.partialOutputStream) last = part;
    return [last, await result.output];
  };
  cases[`${kind}_tools`] = async () => {
    const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? 'required' : 'none' });
    const { steps, text } = await generateText({
      ...asked, tools: { weather }, prompt: 'How is the weather in Oslo?', stopWhen: stepCountIs(2), maxOutputTokens: 60, prepareStep,
    });
    const results = steps[0].toolResults.map(({ input, output }) => [input.city, output]);
    if (!results.length || steps.length !== 2) throw new Error(`no call: ${JSON.stringify(steps)}`);
    return [results, text];
  };
}
for (const [name, of] of [['openai', openai.embedding(model)], ['compatible', compatible.embeddingModel(model)]]) {
  cases[`${name}_vectors`] = async () => (await embedMany({ model: of, values: ['The sea.', 'A ship.'] })).embeddings.map((vector) => vector.slice(0, 8));
}
await run(cases);
