// What an application does with octavo, in Java: make run ENDPOINTS=127.0.0.1:50051,127.0.0.1:50052
// Each part below prints one line at its end. ../README.md says what the lines mean.
import com.google.gson.Gson;
import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import dev.octavo.v1.AttachRequest;
import dev.octavo.v1.CancelRequest;
import dev.octavo.v1.CompleteResponse;
import dev.octavo.v1.FinishReason;
import dev.octavo.v1.GenerateEvent;
import dev.octavo.v1.GenerateRequest;
import dev.octavo.v1.InferenceGrpc;
import dev.octavo.v1.Output;
import dev.octavo.v1.SamplingParams;
import google.rpc.GoogleRpc; // of ../protos; newer proto-google-common-protos have com.google.rpc.ErrorInfo
import grpc.health.v1.GrpcHealthV1.HealthCheckRequest;
import grpc.health.v1.HealthGrpc;
import io.grpc.Context;
import io.grpc.Deadline;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import java.io.FileOutputStream;
import java.io.FileDescriptor;
import java.io.IOException;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Iterator;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import java.util.concurrent.Callable;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import java.util.function.Consumer;

public final class Client {
  static final Metadata.Key<byte[]> DETAILS =
      Metadata.Key.of("grpc-status-details-bin", Metadata.BINARY_BYTE_MARSHALLER);
  static final PrintStream out =
      new PrintStream(new FileOutputStream(FileDescriptor.out), true, StandardCharsets.UTF_8);

  static final int MAX_FAILURES = 600; // without an event between them; with the pauses after them about five minutes

  static List<String> endpoints;
  static final List<ManagedChannel> channels = new ArrayList<>();
  static final List<InferenceGrpc.InferenceBlockingStub> routers = new ArrayList<>();

  static void connect(String list) throws IOException {
    String text = Files.readString(Path.of(System.getProperty("service_config"))); // protos/service_config.json
    @SuppressWarnings("unchecked")
    Map<String, ?> serviceConfig = new Gson().fromJson(text, Map.class); // its numbers are Double, as grpc-java wants
    endpoints = List.of(list.split(","));
    for (String endpoint : endpoints) {
      ManagedChannel channel =
          ManagedChannelBuilder.forTarget(endpoint)
              .usePlaintext()
              .defaultServiceConfig(serviceConfig)
              .enableRetry()
              .keepAliveTime(10, TimeUnit.SECONDS) // notices a router that vanished without a word
              .keepAliveTimeout(3, TimeUnit.SECONDS)
              .build();
      channels.add(channel);
      routers.add(InferenceGrpc.newBlockingStub(channel));
    }
  }

  // A request for maxTokens tokens. It has an id of its own, so that it can be sent twice and runs once.
  static GenerateRequest.Builder newRequest(String text, int maxTokens) {
    return GenerateRequest.newBuilder()
        .setRequestId(UUID.randomUUID().toString())
        .setText(text)
        .setSampling(SamplingParams.newBuilder().setTemperature(0).setMaxTokens(maxTokens).setIgnoreEos(true));
  }

  // What octavo says of a failed call: the details of google.rpc.Status, if there are any.
  static final class Explanation {
    final Status.Code code;
    String reason = ""; // empty: no router said this; the connection broke, or a proxy answered
    final List<String> fields = new ArrayList<>();
    long retryMs = 0;

    Explanation(StatusRuntimeException error) {
      code = error.getStatus().getCode();
      byte[] bytes = error.getTrailers() == null ? null : error.getTrailers().get(DETAILS);
      if (bytes == null) return;
      try {
        for (Any detail : GoogleRpc.Status.parseFrom(bytes).getDetailsList()) {
          if (detail.is(GoogleRpc.ErrorInfo.class)) reason = detail.unpack(GoogleRpc.ErrorInfo.class).getReason();
          if (detail.is(GoogleRpc.BadRequest.class)) {
            var violations = detail.unpack(GoogleRpc.BadRequest.class).getFieldViolationsList();
            violations.forEach(violation -> fields.add(violation.getField()));
          }
          if (detail.is(GoogleRpc.RetryInfo.class)) {
            var delay = detail.unpack(GoogleRpc.RetryInfo.class).getRetryDelay();
            retryMs = delay.getSeconds() * 1000 + delay.getNanos() / 1_000_000;
          }
        }
      } catch (InvalidProtocolBufferException wrong) {
        throw new IllegalStateException(wrong);
      }
    }

    // Whether another router may go on with the stream: this one is gone, is going, or has no room for it.
    boolean elsewhere() {
      switch (code) {
        case UNAVAILABLE:
          return true;
        case RESOURCE_EXHAUSTED:
          return !reason.isEmpty();
        case INTERNAL:
        case UNKNOWN:
        case CANCELLED:
          return reason.isEmpty();
        default:
          return false;
      }
    }
  }

  // How a stream went: how often it was attached again, and which status ended the connection before.
  static final class Journey {
    int attached = 0;
    Status.Code status = Status.Code.OK;
  }

  // Calls `use` with every event of a request, once and in order, over as many routers as it takes.
  static Journey follow(GenerateRequest request, Deadline deadline, Consumer<GenerateEvent> use)
      throws InterruptedException {
    Journey journey = new Journey();
    AttachRequest place = null; // after the last event that was used
    int nextIndex = 0;
    int failures = 0; // since the last event
    for (int attempt = 0; ; attempt++) {
      InferenceGrpc.InferenceBlockingStub router = routers.get(attempt % routers.size());
      if (deadline != null) router = router.withDeadline(deadline);
      Status.Code status = Status.Code.OK; // an end without `finished` is none
      long retryMs = 0;
      Context.CancellableContext call = Context.current().withCancellation();
      Context before = call.attach();
      try {
        Iterator<GenerateEvent> stream = place == null ? router.generate(request) : router.attach(place);
        while (stream.hasNext()) {
          GenerateEvent event = stream.next();
          use.accept(event);
          place = AttachRequest.newBuilder().setResumeToken(event.getResumeToken()).build();
          nextIndex = event.getFirstIndex() + event.getTokenIdsCount();
          failures = 0;
          if (event.hasFinished()) return journey;
        }
      } catch (StatusRuntimeException error) {
        Explanation told = new Explanation(error);
        if (told.code == Status.Code.DEADLINE_EXCEEDED && place != null && deadline != null) {
          deadline = null; // the call has ended with the request: fetch its last tokens
        } else if (told.reason.equals("FOREIGN_TOKEN")) { // the store was lost, and the key of tokens with it
          place = AttachRequest.newBuilder().setRequestId(request.getRequestId()).addNextIndexes(nextIndex).build();
        } else if (!told.elsewhere() || failures > MAX_FAILURES) {
          throw error;
        }
        status = told.code;
        retryMs = told.retryMs;
      } finally {
        call.detach(before);
        call.cancel(null); // a call that has not ended
      }
      journey.status = status;
      Thread.sleep(retryMs + ThreadLocalRandom.current().nextLong(Math.min(1000L, 50L << Math.min(failures, 10))));
      failures++;
      journey.attached += place == null ? 0 : 1;
    }
  }

  // An answer that grows. Each token has an index: a lost one or a double one cannot go unnoticed.
  static final class Answer {
    int tokens = 0;
    final StringBuilder text = new StringBuilder();
    String finish = "";

    void add(GenerateEvent event) {
      if (event.getFirstIndex() != tokens) {
        throw new IllegalStateException("token " + event.getFirstIndex() + " came, " + tokens + " is due");
      }
      tokens += event.getTokenIdsCount();
      text.append(event.getText());
      if (event.getFinishReason() != FinishReason.FINISH_REASON_UNSPECIFIED) finish = name(event.getFinishReason());
      if (event.getFinished().hasFailure()) {
        throw new IllegalStateException(event.getFinished().getFailure().getMessage());
      }
    }

    @Override
    public String toString() {
      return "tokens=" + tokens + " finish=" + finish;
    }
  }

  static String name(FinishReason reason) {
    return reason.name().substring("FINISH_REASON_".length());
  }

  static String health() {
    var request = HealthCheckRequest.newBuilder().setService("octavo.v1.Inference").build();
    return "status=" + HealthGrpc.newBlockingStub(channels.get(0)).check(request).getStatus();
  }

  static String stream() throws InterruptedException {
    Answer answer = new Answer();
    follow(
        newRequest("Once upon a time", 24).build(),
        null,
        event -> {
          answer.add(event);
          out.print(event.getText());
        });
    out.println();
    return answer.toString();
  }

  static String complete() {
    CompleteResponse reply = routers.get(0).complete(newRequest("Il était une fois", 24).build());
    Output output = reply.getOutputs(0);
    out.println(output.getText());
    return "prompt_tokens=" + reply.getUsage().getPromptTokens()
        + " tokens=" + output.getTokenIdsCount() + " finish=" + name(output.getFinishReason());
  }

  static String cancel() throws InterruptedException {
    Answer answer = new Answer();
    GenerateRequest request = newRequest("Count for ever: 1, 2, 3,", 1000).build();
    var what = CancelRequest.newBuilder().setRequestId(request.getRequestId()).build();
    follow(
        request,
        null,
        event -> {
          if (answer.tokens == 0) routers.get(0).cancel(what);
          answer.add(event);
        });
    return answer.toString();
  }

  static String deadline() throws InterruptedException {
    Answer answer = new Answer();
    var request = newRequest("Count for ever: 1, 2, 3,", 1000).build();
    follow(request, Deadline.after(1, TimeUnit.SECONDS), answer::add);
    return answer.toString();
  }

  static String errors() {
    GenerateRequest.Builder wrong = newRequest("Hello", 1);
    wrong.getSamplingBuilder().setTemperature(-1).setTopP(2);
    try {
      routers.get(0).complete(wrong.build());
    } catch (StatusRuntimeException error) {
      Explanation told = new Explanation(error);
      return "code=" + told.code + " reason=" + told.reason + " fields=" + String.join(",", told.fields);
    }
    throw new IllegalStateException("two wrong fields were accepted");
  }

  static String attach() throws InterruptedException {
    Answer answer = new Answer();
    Journey journey =
        follow(
            newRequest("The story of a router:", 1000).build(),
            null,
            event -> {
              if (answer.tokens == 0) out.println("attach reading from=" + endpoints.get(0)); // kill this router now
              answer.add(event);
            });
    out.println(answer.text);
    return "attached=" + journey.attached + " status=" + journey.status + " " + answer;
  }

  public static void main(String[] arguments) throws Exception {
    Map<String, Callable<String>> parts = new LinkedHashMap<>();
    parts.put("health", Client::health);
    parts.put("stream", Client::stream);
    parts.put("complete", Client::complete);
    parts.put("cancel", Client::cancel);
    parts.put("deadline", Client::deadline);
    parts.put("errors", Client::errors);
    parts.put("attach", Client::attach);
    if (arguments.length == 0) {
      System.err.println("usage: Client HOST:PORT[,HOST:PORT...] [part ...]");
      System.exit(2);
    }
    connect(arguments[0]);
    List<String> chosen = Arrays.asList(arguments).subList(1, arguments.length);
    boolean failed = false;
    for (var part : parts.entrySet()) {
      if (!chosen.isEmpty() && !chosen.contains(part.getKey())) continue;
      try {
        out.println(part.getKey() + " ok " + part.getValue().call());
      } catch (StatusRuntimeException error) {
        Explanation told = new Explanation(error);
        out.println(part.getKey() + " failed code=" + told.code + " reason=" + told.reason
            + " retry_ms=" + told.retryMs + " " + error.getStatus().getDescription());
        failed = true;
      } catch (IllegalStateException error) {
        out.println(part.getKey() + " failed code=UNKNOWN reason= retry_ms=0 " + error.getMessage());
        failed = true;
      }
    }
    for (ManagedChannel channel : channels) channel.shutdownNow();
    System.exit(failed ? 1 : 0);
  }
}
