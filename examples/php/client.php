<?php
// What an application does with octavo, in PHP: make run ENDPOINTS=127.0.0.1:50051,127.0.0.1:50052
// Each part below prints one line at its end. ../README.md says what the lines mean.
//
// Debian has no extension grpc. The class Router stands in its place: calls over HTTP/2 by curl, which most PHP has. With
// the extension, use Octavo\V1\InferenceClient, which grpc_php_plugin generates, in place of Router; the rest stays.
declare(strict_types=1);

use Google\Protobuf\Internal\Message;
use Google\Rpc\BadRequest;
use Google\Rpc\ErrorInfo;
use Google\Rpc\RetryInfo;
use Grpc\Health\V1\HealthCheckRequest;
use Grpc\Health\V1\HealthCheckResponse;
use Grpc\Health\V1\HealthCheckResponse\ServingStatus;
use Octavo\V1\AttachRequest;
use Octavo\V1\CancelRequest;
use Octavo\V1\CancelResponse;
use Octavo\V1\CompleteResponse;
use Octavo\V1\FinishReason;
use Octavo\V1\GenerateEvent;
use Octavo\V1\GenerateRequest;
use Octavo\V1\SamplingParams;

set_include_path(getenv('STUBS') . PATH_SEPARATOR . get_include_path());
spl_autoload_register(function (string $name): void { // in place of Composer's
    $path = stream_resolve_include_path(strtr($name, '\\', '/') . '.php');
    if ($path !== false) {
        require $path;
    }
});

const CODES = [
    'OK', 'CANCELLED', 'UNKNOWN', 'INVALID_ARGUMENT', 'DEADLINE_EXCEEDED', 'NOT_FOUND', 'ALREADY_EXISTS',
    'PERMISSION_DENIED', 'RESOURCE_EXHAUSTED', 'FAILED_PRECONDITION', 'ABORTED', 'OUT_OF_RANGE', 'UNIMPLEMENTED',
    'INTERNAL', 'UNAVAILABLE', 'DATA_LOSS', 'UNAUTHENTICATED',
];
const MAX_FAILURES = 600; // without an event between them; with the pauses after them about five minutes
const INFERENCE = '/octavo.v1.Inference/';

/** A call that failed: its code by name, and the bytes of grpc-status-details-bin. */
final class CallError extends Exception
{
    public function __construct(public readonly string $status, string $message, public readonly string $details = '')
    {
        parent::__construct($message);
    }
}

/** Unary calls and streams of gRPC at one router, over HTTP/2 without TLS and compression. */
final class Router
{
    public function __construct(public readonly string $endpoint)
    {
    }

    /** The one answer of a call, repeated as protos/service_config.json says for Generate and Complete. */
    public function unary(string $path, Message $request, string $answer): Message
    {
        for ($attempt = 0; ; $attempt++) {
            try {
                $found = null;
                $this->stream($path, $request, $answer, function (Message $message) use (&$found): void {
                    $found = $message;
                }, null, $attempt);
                return $found ?? throw new CallError('INTERNAL', 'an answer without a message');
            } catch (CallError $error) {
                if ($error->status !== 'RESOURCE_EXHAUSTED' || $attempt >= 3) {
                    throw $error;
                }
                usleep(random_int(0, 100_000 << $attempt));
            }
        }
    }

    /**
     * Calls $use with every answer. Returns where the call has ended with OK, or where $use has returned true: that
     * ends the connection. $deadline is a time as microtime(true) tells it.
     */
    public function stream(
        string $path, Message $request, string $answer, callable $use, ?float $deadline = null, int $attempt = 0,
    ): void {
        $headers = ['te: trailers', 'content-type: application/grpc', 'expect:'];
        $timeout = 0;
        if ($deadline !== null) {
            $timeout = max(1, (int) (($deadline - microtime(true)) * 1000));
            $headers[] = "grpc-timeout: {$timeout}m";
        }
        if ($attempt > 0) {
            $headers[] = "grpc-previous-rpc-attempts: $attempt";
        }
        $body = $request->serializeToString();
        [$told, $buffer, $done, $thrown] = [[], '', false, null];
        $call = curl_init("http://{$this->endpoint}$path");
        curl_setopt_array($call, [
            CURLOPT_HTTP_VERSION => CURL_HTTP_VERSION_2_PRIOR_KNOWLEDGE,
            CURLOPT_PROXY => '',
            CURLOPT_POSTFIELDS => pack('CN', 0, strlen($body)) . $body,
            CURLOPT_HTTPHEADER => $headers,
            CURLOPT_TIMEOUT_MS => $timeout,
            CURLOPT_CONNECTTIMEOUT_MS => 3_000,
            // curl sends no pings: a router that says nothing for so long is taken for one that vanished.
            CURLOPT_LOW_SPEED_LIMIT => 1,
            CURLOPT_LOW_SPEED_TIME => 15,
            CURLOPT_HEADERFUNCTION => function ($call, string $line) use (&$told): int { // of trailers, too
                [$name, $value] = explode(':', $line, 2) + [1 => ''];
                $told[strtolower($name)] = trim($value);
                return strlen($line);
            },
            CURLOPT_WRITEFUNCTION => function ($call, string $data) use (&$buffer, &$done, &$thrown, $answer, $use): int {
                $buffer .= $data;
                try {
                    while (!$done && strlen($buffer) >= 5 && strlen($buffer) >= 5 + ($size = unpack('N', $buffer, 1)[1])) {
                        $message = new $answer();
                        $message->mergeFromString(substr($buffer, 5, $size));
                        $buffer = substr($buffer, 5 + $size);
                        $done = $use($message) === true;
                    }
                } catch (Throwable $error) {
                    $thrown = $error; // it must not pass through curl
                }
                return $done || $thrown ? -1 : strlen($data);
            },
        ]);
        curl_exec($call);
        if ($thrown) {
            throw $thrown;
        }
        if ($done) {
            return;
        }
        [$number, $http] = [curl_errno($call), curl_getinfo($call, CURLINFO_RESPONSE_CODE)];
        if (isset($told['grpc-status'])) {
            if ($told['grpc-status'] !== '0') {
                $details = base64_decode($told['grpc-status-details-bin'] ?? '');
                $message = rawurldecode($told['grpc-message'] ?? '');
                throw new CallError(CODES[$told['grpc-status']] ?? 'UNKNOWN', $message, $details);
            }
        } elseif ($deadline !== null && microtime(true) >= $deadline) {
            throw new CallError('DEADLINE_EXCEEDED', 'the deadline has passed');
        } elseif ($number !== 0) {
            // 92: the router, or a proxy, has broken off this stream alone.
            throw new CallError($number === 92 ? 'INTERNAL' : 'UNAVAILABLE', curl_error($call));
        } elseif ($http !== 200) {
            throw new CallError(in_array($http, [429, 502, 503, 504]) ? 'UNAVAILABLE' : 'UNKNOWN', "HTTP status $http");
        } else {
            throw new CallError('UNKNOWN', 'the stream has ended without a status');
        }
    }
}

/** A request for so many tokens. It has an id of its own, so that it can be sent twice and runs once. */
function newRequest(string $text, int $maxTokens): GenerateRequest
{
    $sampling = (new SamplingParams())->setTemperature(0)->setMaxTokens($maxTokens)->setIgnoreEos(true);
    return (new GenerateRequest())->setRequestId('php-' . bin2hex(random_bytes(16)))->setText($text)->setSampling($sampling);
}

/** What octavo says of a failed call: the details of google.rpc.Status, if there are any. */
function explain(CallError $error): object
{
    // Without a reason, no router said this: the connection broke, or a proxy answered.
    $told = (object) ['status' => $error->status, 'reason' => '', 'fields' => [], 'retryMs' => 0];
    $rich = new Google\Rpc\Status();
    $rich->mergeFromString($error->details);
    foreach ($rich->getDetails() as $any) {
        $type = ['google.rpc.ErrorInfo' => ErrorInfo::class, 'google.rpc.BadRequest' => BadRequest::class,
            'google.rpc.RetryInfo' => RetryInfo::class][basename($any->getTypeUrl())] ?? null;
        if ($type === null) {
            continue;
        }
        $detail = new $type();
        $detail->mergeFromString($any->getValue());
        if ($detail instanceof ErrorInfo) {
            $told->reason = $detail->getReason();
        } elseif ($detail instanceof BadRequest) {
            foreach ($detail->getFieldViolations() as $violation) {
                $told->fields[] = $violation->getField();
            }
        } else {
            $delay = $detail->getRetryDelay();
            $told->retryMs = (int) $delay->getSeconds() * 1000 + intdiv($delay->getNanos(), 1_000_000);
        }
    }
    return $told;
}

/** Whether another router may go on with the stream: this one is gone, is going, or has no room for it. */
function elsewhere(object $told): bool
{
    $without = ['UNAVAILABLE', 'INTERNAL', 'UNKNOWN', 'CANCELLED'];
    return in_array($told->status, $told->reason === '' ? $without : ['UNAVAILABLE', 'RESOURCE_EXHAUSTED']);
}

/**
 * Calls $use with every event of a request, once and in order, over as many routers as it takes. Returns how often the
 * stream was attached again, and which status ended the connection before.
 */
function follow(array $routers, GenerateRequest $request, callable $use, ?float $deadline = null): object
{
    $journey = (object) ['attached' => 0, 'status' => 'OK'];
    [$place, $nextIndex, $failures, $finished] = [null, 0, 0, false]; // after the last event that was used
    for ($attempt = 0; ; $attempt++) {
        $router = $routers[$attempt % count($routers)];
        $take = function (GenerateEvent $event) use (&$place, &$nextIndex, &$failures, &$finished, $use): bool {
            $use($event);
            $place = (new AttachRequest())->setResumeToken($event->getResumeToken());
            $nextIndex = $event->getFirstIndex() + count($event->getTokenIds());
            $failures = 0;
            return $finished = $event->hasFinished();
        };
        [$status, $retryMs] = ['OK', 0]; // an end without `finished` is none
        try {
            $method = INFERENCE . ($place === null ? 'Generate' : 'Attach');
            $router->stream($method, $place ?? $request, GenerateEvent::class, $take, $deadline);
            if ($finished) {
                return $journey;
            }
        } catch (CallError $error) {
            $told = explain($error);
            if ($told->status === 'DEADLINE_EXCEEDED' && $place !== null && $deadline !== null) {
                $deadline = null; // the call has ended with the request: fetch its last tokens
            } elseif ($told->reason === 'FOREIGN_TOKEN') { // the store was lost, and the key of tokens with it
                $place = (new AttachRequest())->setRequestId($request->getRequestId())->setNextIndexes([$nextIndex]);
            } elseif (!elsewhere($told) || $failures > MAX_FAILURES) {
                throw $error;
            }
            [$status, $retryMs] = [$told->status, $told->retryMs];
        }
        $journey->status = $status;
        usleep($retryMs * 1000 + random_int(0, min(1_000_000, 50_000 << min($failures, 10))));
        $failures++;
        $journey->attached += $place === null ? 0 : 1;
    }
}

/** It grows. Each token has an index: a lost one or a double one cannot go unnoticed. */
final class Answer
{
    public int $tokens = 0;
    public string $text = '';
    public string $finish = '';

    public function add(GenerateEvent $event): void
    {
        if ($event->getFirstIndex() !== $this->tokens) {
            throw new RuntimeException("token {$event->getFirstIndex()} came, {$this->tokens} is due");
        }
        $this->tokens += count($event->getTokenIds());
        $this->text .= $event->getText();
        if ($event->getFinishReason() !== FinishReason::FINISH_REASON_UNSPECIFIED) {
            $this->finish = finishName($event->getFinishReason());
        }
        if ($event->getFinished()?->hasFailure()) {
            throw new RuntimeException($event->getFinished()->getFailure()->getMessage());
        }
    }

    public function __toString(): string
    {
        return "tokens={$this->tokens} finish={$this->finish}";
    }
}

function finishName(int $reason): string
{
    return substr(FinishReason::name($reason), strlen('FINISH_REASON_'));
}

$parts = [
    'health' => function (array $routers): string {
        $request = (new HealthCheckRequest())->setService('octavo.v1.Inference');
        $reply = $routers[0]->unary('/grpc.health.v1.Health/Check', $request, HealthCheckResponse::class);
        return 'status=' . ServingStatus::name($reply->getStatus());
    },

    'stream' => function (array $routers): string {
        $answer = new Answer();
        follow($routers, newRequest('Once upon a time', 24), function (GenerateEvent $event) use ($answer): void {
            $answer->add($event);
            echo $event->getText();
        });
        echo "\n";
        return (string) $answer;
    },

    'complete' => function (array $routers): string {
        $reply = $routers[0]->unary(INFERENCE . 'Complete', newRequest('Il était une fois', 24), CompleteResponse::class);
        [$output, $tokens] = [$reply->getOutputs()[0], $reply->getUsage()->getPromptTokens()];
        echo $output->getText(), "\n";
        $finish = finishName($output->getFinishReason());
        return "prompt_tokens=$tokens tokens=" . count($output->getTokenIds()) . " finish=$finish";
    },

    'cancel' => function (array $routers): string {
        $answer = new Answer();
        $request = newRequest('Count for ever: 1, 2, 3,', 1000);
        follow($routers, $request, function (GenerateEvent $event) use ($answer, $routers, $request): void {
            if ($answer->tokens === 0) {
                $what = (new CancelRequest())->setRequestId($request->getRequestId());
                $routers[0]->unary(INFERENCE . 'Cancel', $what, CancelResponse::class);
            }
            $answer->add($event);
        });
        return (string) $answer;
    },

    'deadline' => function (array $routers): string {
        $answer = new Answer();
        follow($routers, newRequest('Count for ever: 1, 2, 3,', 1000), $answer->add(...), microtime(true) + 1);
        return (string) $answer;
    },

    'errors' => function (array $routers): string {
        $wrong = newRequest('Hello', 1);
        $wrong->getSampling()->setTemperature(-1)->setTopP(2);
        try {
            $routers[0]->unary(INFERENCE . 'Complete', $wrong, CompleteResponse::class);
        } catch (CallError $error) {
            $told = explain($error);
            return "code={$told->status} reason={$told->reason} fields=" . implode(',', $told->fields);
        }
        throw new RuntimeException('two wrong fields were accepted');
    },

    'attach' => function (array $routers): string {
        $answer = new Answer();
        $use = function (GenerateEvent $event) use ($answer, $routers): void {
            if ($answer->tokens === 0) {
                echo "attach reading from={$routers[0]->endpoint}\n"; // kill this router now
            }
            $answer->add($event);
        };
        $journey = follow($routers, newRequest('The story of a router:', 1000), $use);
        echo $answer->text, "\n";
        return "attached={$journey->attached} status={$journey->status} $answer";
    },
];

if ($argc < 2) {
    fwrite(STDERR, "usage: client.php HOST:PORT[,HOST:PORT...] [part ...]\n");
    exit(2);
}
$routers = array_map(fn (string $endpoint): Router => new Router($endpoint), explode(',', $argv[1]));
$chosen = array_slice($argv, 2);
$failed = 0;
foreach ($parts as $name => $part) {
    if ($chosen && !in_array($name, $chosen)) {
        continue;
    }
    try {
        echo "$name ok {$part($routers)}\n";
    } catch (CallError $error) {
        $told = explain($error);
        $values = "code={$told->status} reason={$told->reason} retry_ms={$told->retryMs}";
        echo "$name failed $values {$error->getMessage()}\n";
        $failed = 1;
    } catch (RuntimeException $error) {
        echo "$name failed code=UNKNOWN reason= retry_ms=0 {$error->getMessage()}\n";
        $failed = 1;
    }
}
exit($failed);
