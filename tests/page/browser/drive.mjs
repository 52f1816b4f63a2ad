// Drives a headless browser for a test: one JSON object per line on stdin, one answer per line on stdout.
import { chromium } from 'playwright-core';
import readline from 'node:readline';

const browser = await chromium.launch({ executablePath: process.argv[2], args: ['--no-sandbox'] });
let page = null, requests = [], problems = [];

const commands = {
  async open({ url, width, height, scheme }) {
    if (page) await page.context().close();
    [requests, problems] = [[], []];
    const context = await browser.newContext({ viewport: { width, height }, colorScheme: scheme });
    page = await context.newPage();
    page.on('request', (request) => requests.push(request.url()));
    page.on('pageerror', (error) => problems.push(String(error)));
    page.on('console', (message) => { if (message.type() === 'error') problems.push(message.text()); });
    await page.addInitScript({ path: new URL('look.js', import.meta.url).pathname });
    await page.goto(url);
  },
  evaluate: ({ script }) => page.evaluate(script),
  press: ({ key }) => page.keyboard.press(key),
  type: ({ text }) => page.keyboard.type(text),
  resize: ({ width, height }) => page.setViewportSize({ width, height }),
  screenshot: ({ path, full }) => page.screenshot({ path, fullPage: full }).then(() => null),
  requests: () => requests,
  problems: () => problems,
};

for await (const line of readline.createInterface({ input: process.stdin })) {
  const { command, ...given } = JSON.parse(line);
  let answer;
  try {
    answer = { value: (await commands[command](given)) ?? null };
  } catch (error) {
    answer = { error: String(error) };
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
await browser.close();
