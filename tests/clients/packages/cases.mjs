// As cases.py, for Node: node use_NAME.mjs http://HOST:PORT MODEL [CASE ...]
import { createInterface } from 'node:readline';

export const [router, model, ...chosen] = process.argv.slice(2);
export const base = `${router}/v1`;

export async function run(cases) {
  for await (const _ of createInterface({ input: process.stdin })) {
    for (const [name, work] of Object.entries(cases)) {
      if (chosen.length && !chosen.includes(name)) continue;
      const line = { case: name };
      try {
        line.value = await work();
      } catch (error) {
        line.error = `${error.name}: ${error.message}`;
      }
      console.log(JSON.stringify(line));
    }
    console.log('{}'); // the end of a round
  }
}

export async function joined(pieces) {
  let text = '';
  for await (const piece of pieces) text += piece;
  return text;
}
