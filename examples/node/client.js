// What an application does with octavo, in Node: npm ci && npm start -- 127.0.0.1:50051,127.0.0.1:50052 [part …]
// Each part below prints one line at its end. ../README.md says what the lines mean.
'use strict';

const fs = require('node:fs');
const path = require('node:path');
const { randomUUID } = require('node:crypto');
const { setTimeout: sleep } = require('node:timers/promises');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const CONTRACT = path.join(__dirname, '../../protos');
const STANDARD = path.join(__dirname, '../protos'); // google.rpc and grpc.health.v1, which npm packages leave out
const definition = loader.loadSync(['octavo/v1/inference.proto', 'google_rpc.proto', 'grpc_health_v1.proto'], {
  includeDirs: [CONTRACT, STANDARD], keepCase: true, enums: String, longs: String, oneofs: true, defaults: true,
});
const { octavo, grpc: { health } } = grpc.loadPackageDefinition(definition);

const OPTIONS = {
  'grpc.service_config': fs.readFileSync(path.join(CONTRACT, 'service_config.json'), 'utf8'),
  'grpc.keepalive_time_ms': 1_000, // notices within 3 s a router that hangs or vanished without a word
  'grpc.keepalive_timeout_ms': 2_000,
  'grpc.initial_reconnect_backoff_ms': 100,
  'grpc.max_reconnect_backoff_ms': 1_000,
};
const { status: Code } = grpc;
const MAX_FAILURES = 600; // without an event between them; with the pauses after them about five minutes
const codeName = (code) => Object.keys(Code).find((name) => Code[name] === code);
const finishName = (reason) => reason.replace('FINISH_REASON_', '');

const [endpointList, ...chosenParts] = process.argv.slice(2);
if (!endpointList) {
  console.error('usage: npm start -- HOST:PORT[,HOST:PORT…] [part …]');
  process.exit(2);
}
const endpoints = endpointList.split(',');
const routers = endpoints.map((it) => new octavo.v1.Inference(it, grpc.credentials.createInsecure(), OPTIONS));

/** The reply of a unary call. */
const call = (client, method, request, options = {}) =>
  new Promise((resolve, reject) => {
    client[method](request, new grpc.Metadata(), options, (error, reply) => (error ? reject(error) : resolve(reply)));
  });

/** A request for `maxTokens` tokens. It has an id of its own, so that it can be sent twice and runs once. */
const request = (text, maxTokens) => ({
  request_id: randomUUID(),
  text,
  sampling: { temperature: 0, max_tokens: maxTokens, ignore_eos: true },
});

/** What octavo says of a failed call beside code and message: the details of google.rpc.Status, if there are any. */
function explain(error) {
  const told = { code: codeName(error.code), reason: '', fields: [], retryMs: 0 };
  const [bytes] = error.metadata ? error.metadata.get('grpc-status-details-bin') : [];
  if (!bytes) return told; // no router said this: the connection broke, or a proxy answered
  const unpack = (type, value) => definition[`google.rpc.${type}`].deserialize(value);
  for (const { type_url: url, value } of unpack('Status', bytes).details) {
    const type = url.split('/').pop();
    if (type === 'google.rpc.ErrorInfo') told.reason = unpack('ErrorInfo', value).reason;
    if (type === 'google.rpc.BadRequest') told.fields = unpack('BadRequest', value).field_violations.map((it) => it.field);
    if (type === 'google.rpc.RetryInfo') {
      const { seconds, nanos } = unpack('RetryInfo', value).retry_delay;
      told.retryMs = Number(seconds) * 1000 + nanos / 1e6;
    }
  }
  return told;
}

/** Whether another router may go on with the stream: this one is gone, is going, or has no room for it. */
function elsewhere(error) {
  const { code, reason } = explain(error);
  if (reason) return ['UNAVAILABLE', 'RESOURCE_EXHAUSTED'].includes(code);
  return ['UNAVAILABLE', 'INTERNAL', 'UNKNOWN', 'CANCELLED'].includes(code);
}

/**
 * Every event of a request, once and in order, over as many routers as it takes.
 * `seen` is told how often the stream was attached again, and which status ended the connection before.
 */
async function* follow(body, seen = {}, options = {}) {
  let place = null; // after the last event that was handed out
  let nextIndex = 0;
  let failures = 0; // since the last event
  seen.attached = 0;
  for (let attempt = 0; ; attempt += 1) {
    const router = routers[attempt % routers.length];
    let retryMs = 0;
    const stream = place ? router.Attach(place, options) : router.Generate(body, options);
    try {
      for await (const event of stream) {
        yield event;
        place = { resume_token: event.resume_token };
        nextIndex = event.first_index + event.token_ids.length;
        failures = 0;
        if (event.finished) return;
      }
      seen.status = 'OK'; // an end without `finished` is none
    } catch (error) {
      if (error.code === Code.DEADLINE_EXCEEDED && place && options.deadline) {
        options = {}; // the call has ended with the request: fetch its last tokens
      } else if (explain(error).reason === 'FOREIGN_TOKEN') { // the store was lost, and the key of tokens with it
        place = { request_id: body.request_id, next_indexes: [nextIndex] };
      } else if (!elsewhere(error) || failures > MAX_FAILURES) {
        throw error;
      }
      seen.status = codeName(error.code);
      retryMs = explain(error).retryMs;
    } finally {
      stream.cancel();
    }
    await sleep(retryMs + Math.random() * Math.min(1000, 50 * 2 ** failures));
    failures += 1;
    seen.attached += place ? 1 : 0;
  }
}

/** Adds an event to an answer. Each token has an index: a lost one or a double one cannot go unnoticed. */
function add(answer, event) {
  if (event.first_index !== answer.tokens) throw new Error(`token ${event.first_index} came, ${answer.tokens} is due`);
  answer.tokens += event.token_ids.length;
  answer.text += event.text;
  if (event.finish_reason !== 'FINISH_REASON_UNSPECIFIED') answer.finish = finishName(event.finish_reason);
  if (event.finished && event.finished.failure) throw new Error(event.finished.failure.message);
}

const parts = {
  async health() {
    const client = new health.v1.Health(endpoints[0], grpc.credentials.createInsecure(), OPTIONS);
    const reply = await call(client, 'Check', { service: 'octavo.v1.Inference' });
    return `status=${reply.status}`;
  },

  async stream() {
    const answer = { tokens: 0, text: '', finish: '' };
    for await (const event of follow(request('Once upon a time', 24))) {
      add(answer, event);
      process.stdout.write(event.text);
    }
    process.stdout.write('\n');
    return `tokens=${answer.tokens} finish=${answer.finish}`;
  },

  async complete() {
    const reply = await call(routers[0], 'Complete', request('Il était une fois', 24));
    const [output] = reply.outputs;
    console.log(output.text);
    return `prompt_tokens=${reply.usage.prompt_tokens} tokens=${output.token_ids.length} finish=${finishName(output.finish_reason)}`;
  },

  async cancel() {
    const answer = { tokens: 0, text: '', finish: '' };
    const body = request('Count for ever: 1, 2, 3,', 1000);
    for await (const event of follow(body)) {
      if (answer.tokens === 0) await call(routers[0], 'Cancel', { request_id: body.request_id });
      add(answer, event);
    }
    return `tokens=${answer.tokens} finish=${answer.finish}`;
  },

  async deadline() {
    const answer = { tokens: 0, text: '', finish: '' };
    const deadline = Date.now() + 1000;
    for await (const event of follow(request('Count for ever: 1, 2, 3,', 1000), {}, { deadline })) add(answer, event);
    return `tokens=${answer.tokens} finish=${answer.finish}`;
  },

  async errors() {
    const wrong = { text: 'Hello', sampling: { temperature: -1, top_p: 2 } };
    const error = await call(routers[0], 'Complete', wrong).then(() => new Error('accepted'), (refusal) => refusal);
    const { code, reason, fields } = explain(error);
    return `code=${code} reason=${reason} fields=${fields.join(',')}`;
  },

  async attach() {
    const answer = { tokens: 0, text: '', finish: '' };
    const seen = {};
    for await (const event of follow(request('The story of a router:', 1000), seen)) {
      if (answer.tokens === 0) console.log(`attach reading from=${endpoints[0]}`); // kill this router now
      add(answer, event);
    }
    console.log(answer.text);
    return `attached=${seen.attached} status=${seen.status || 'OK'} tokens=${answer.tokens} finish=${answer.finish}`;
  },
};

async function main() {
  let failed = false;
  for (const name of chosenParts.length ? chosenParts : Object.keys(parts)) {
    try {
      console.log(`${name} ok ${await parts[name]()}`);
    } catch (error) {
      const { code, reason, retryMs } = explain(error);
      console.log(`${name} failed code=${code} reason=${reason} retry_ms=${retryMs} ${error.message}`);
      failed = true;
    }
  }
  process.exitCode = failed ? 1 : 0;
  routers.forEach((router) => router.close());
}

main();
