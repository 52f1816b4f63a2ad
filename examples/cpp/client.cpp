// What an application does with octavo, in C++: make run ENDPOINTS=127.0.0.1:50051,127.0.0.1:50052
// Each part below prints one line at its end. ../README.md says what the lines mean.
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "google_rpc.pb.h"
#include "grpc_health_v1.grpc.pb.h"
#include "octavo/v1/inference.grpc.pb.h"

namespace {

using octavo::v1::GenerateEvent;
using octavo::v1::GenerateRequest;
using octavo::v1::Inference;
using Clock = std::chrono::system_clock;

constexpr int MAX_FAILURES = 600;  // without an event between them; with the pauses after them about five minutes

std::vector<std::string> endpoints;
std::vector<std::shared_ptr<grpc::Channel>> channels;
std::vector<std::unique_ptr<Inference::Stub>> routers;

void connect(const std::string& list) {
    std::ifstream file(SERVICE_CONFIG);  // protos/service_config.json; the Makefile says where
    std::stringstream service_config;
    service_config << file.rdbuf();
    grpc::ChannelArguments options;
    options.SetServiceConfigJSON(service_config.str());
    options.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 1'000);  // notices within 3 s a router that hangs or vanished
    options.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 2'000);
    options.SetInt("grpc.http2.ping_timeout_ms", 2'000);  // later versions wait this long, and 60 s by default
    options.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
    options.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
    options.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1'000);
    std::stringstream words(list);
    for (std::string endpoint; std::getline(words, endpoint, ',');) {
        endpoints.push_back(endpoint);
        channels.push_back(grpc::CreateCustomChannel(endpoint, grpc::InsecureChannelCredentials(), options));
        routers.push_back(Inference::NewStub(channels.back()));
    }
}

std::string code_name(grpc::StatusCode code) {
    static const char* names[] = {
        "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
        "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
        "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
        "DATA_LOSS", "UNAUTHENTICATED"};
    return names[code];
}

std::string finish_name(octavo::v1::FinishReason reason) {
    return octavo::v1::FinishReason_Name(reason).substr(std::string("FINISH_REASON_").size());
}

// A call that failed. Everything that octavo does not answer with a status is a failure of ours.
struct CallError : std::runtime_error {
    explicit CallError(grpc::Status failed) : std::runtime_error(failed.error_message()), status(std::move(failed)) {}
    grpc::Status status;
};

void expect_ok(const grpc::Status& status) {
    if (!status.ok()) throw CallError(status);
}

// What octavo says of a failed call beside code and message: the details of google.rpc.Status, if there are any.
struct Explanation {
    std::string reason;  // empty: no router said this; the connection broke, or a proxy answered
    std::string fields;
    long retry_ms = 0;
};

Explanation explain(const grpc::Status& status) {
    Explanation told;
    google::rpc::Status rich;
    if (!rich.ParseFromString(status.error_details())) return told;  // these are the bytes of grpc-status-details-bin
    for (const auto& detail : rich.details()) {
        google::rpc::ErrorInfo info;
        google::rpc::BadRequest bad;
        google::rpc::RetryInfo retry;
        if (detail.UnpackTo(&info)) told.reason = info.reason();
        if (detail.UnpackTo(&bad)) {
            for (const auto& violation : bad.field_violations()) {
                told.fields += (told.fields.empty() ? "" : ",") + violation.field();
            }
        }
        if (detail.UnpackTo(&retry))
            told.retry_ms = retry.retry_delay().seconds() * 1000 + retry.retry_delay().nanos() / 1'000'000;
    }
    return told;
}

// Whether another router may go on with the stream: this one is gone, is going, or has no room for it.
bool elsewhere(const grpc::Status& status) {
    const auto code = status.error_code();
    if (!explain(status).reason.empty()) return code == grpc::UNAVAILABLE || code == grpc::RESOURCE_EXHAUSTED;
    return code == grpc::UNAVAILABLE || code == grpc::INTERNAL || code == grpc::UNKNOWN || code == grpc::CANCELLED;
}

std::mt19937_64& dice() {
    static std::mt19937_64 generator{std::random_device{}()};
    return generator;
}

// A request for `max_tokens` tokens. It has an id of its own, so that it can be sent twice and runs once.
GenerateRequest make_request(const std::string& text, int max_tokens) {
    GenerateRequest request;
    request.set_request_id("cpp-" + std::to_string(dice()()) + "-" + std::to_string(dice()()));
    request.set_text(text);
    request.mutable_sampling()->set_temperature(0);
    request.mutable_sampling()->set_max_tokens(max_tokens);
    request.mutable_sampling()->set_ignore_eos(true);
    return request;
}

// How a stream went: how often it was attached again, and which status ended the connection before.
struct Journey {
    int attached = 0;
    grpc::StatusCode status = grpc::OK;
};

// Calls `use` with every event of a request, once and in order, over as many routers as it takes.
Journey follow(const GenerateRequest& request, const std::function<void(const GenerateEvent&)>& use,
               const Clock::time_point* deadline = nullptr) {
    Journey journey;
    std::optional<octavo::v1::AttachRequest> place;  // after the last event that was used
    unsigned next_index = 0;
    int failures = 0;  // since the last event
    for (int attempt = 0;; ++attempt) {
        auto& router = *routers[attempt % routers.size()];
        grpc::ClientContext context;  // its destructor cancels a call that has not ended
        if (deadline != nullptr) context.set_deadline(*deadline);
        auto stream = place ? router.Attach(&context, *place) : router.Generate(&context, request);
        for (GenerateEvent event; stream->Read(&event);) {
            use(event);
            place.emplace().set_resume_token(event.resume_token());
            next_index = event.first_index() + event.token_ids_size();
            failures = 0;
            if (event.has_finished()) return journey;
        }
        const grpc::Status status = stream->Finish();
        const Explanation told = explain(status);
        if (status.error_code() == grpc::DEADLINE_EXCEEDED && place && deadline != nullptr) {
            deadline = nullptr;                       // the call has ended with the request: fetch its last tokens
        } else if (told.reason == "FOREIGN_TOKEN") {  // the store was lost, and the key of tokens with it
            place.emplace().set_request_id(request.request_id());
            place->add_next_indexes(next_index);
        } else if (!status.ok() && (!elsewhere(status) || failures > MAX_FAILURES)) {
            throw CallError(status);
        }  // an OK without `finished` is no end
        journey.status = status.error_code();
        const double bound = std::min(1000.0, 50.0 * (1 << std::min(failures++, 10)));
        const double pause = told.retry_ms + std::uniform_real_distribution<>(0, bound)(dice());
        std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(pause));
        journey.attached += place ? 1 : 0;
    }
}

// An answer that grows. Each token has an index: a lost one or a double one cannot go unnoticed.
struct Answer {
    unsigned tokens = 0;
    std::string text;
    std::string finish;

    void add(const GenerateEvent& event) {
        if (event.first_index() != tokens) {
            throw std::runtime_error("token " + std::to_string(event.first_index()) + " came, " +
                                     std::to_string(tokens) + " is due");
        }
        tokens += event.token_ids_size();
        text += event.text();
        if (event.finish_reason() != octavo::v1::FINISH_REASON_UNSPECIFIED) finish = finish_name(event.finish_reason());
        if (event.finished().has_failure()) throw std::runtime_error(event.finished().failure().message());
    }

    std::string summary() const { return "tokens=" + std::to_string(tokens) + " finish=" + finish; }
};

std::string health() {
    grpc::health::v1::HealthCheckRequest request;
    grpc::health::v1::HealthCheckResponse reply;
    request.set_service("octavo.v1.Inference");
    grpc::ClientContext context;
    expect_ok(grpc::health::v1::Health::NewStub(channels[0])->Check(&context, request, &reply));
    return "status=" + grpc::health::v1::HealthCheckResponse::ServingStatus_Name(reply.status());
}

std::string stream() {
    Answer answer;
    follow(make_request("Once upon a time", 24), [&](const GenerateEvent& event) {
        answer.add(event);
        std::cout << event.text() << std::flush;
    });
    std::cout << "\n";
    return answer.summary();
}

std::string complete() {
    octavo::v1::CompleteResponse reply;
    grpc::ClientContext context;
    expect_ok(routers[0]->Complete(&context, make_request("Il était une fois", 24), &reply));
    const auto& output = reply.outputs(0);
    std::cout << output.text() << "\n";
    return "prompt_tokens=" + std::to_string(reply.usage().prompt_tokens()) +
           " tokens=" + std::to_string(output.token_ids_size()) + " finish=" + finish_name(output.finish_reason());
}

std::string cancel() {
    Answer answer;
    const auto request = make_request("Count for ever: 1, 2, 3,", 1000);
    follow(request, [&](const GenerateEvent& event) {
        if (answer.tokens == 0) {
            octavo::v1::CancelRequest what;
            octavo::v1::CancelResponse reply;
            what.set_request_id(request.request_id());
            grpc::ClientContext context;
            expect_ok(routers[0]->Cancel(&context, what, &reply));
        }
        answer.add(event);
    });
    return answer.summary();
}

std::string deadline() {
    Answer answer;
    const auto until = Clock::now() + std::chrono::seconds(1);
    follow(
        make_request("Count for ever: 1, 2, 3,", 1000), [&](const GenerateEvent& event) { answer.add(event); }, &until);
    return answer.summary();
}

std::string errors() {
    auto wrong = make_request("Hello", 1);
    wrong.mutable_sampling()->set_temperature(-1);
    wrong.mutable_sampling()->set_top_p(2);
    octavo::v1::CompleteResponse reply;
    grpc::ClientContext context;
    const grpc::Status status = routers[0]->Complete(&context, wrong, &reply);
    const Explanation told = explain(status);
    return "code=" + code_name(status.error_code()) + " reason=" + told.reason + " fields=" + told.fields;
}

std::string attach() {
    Answer answer;
    const Journey journey = follow(make_request("The story of a router:", 1000), [&](const GenerateEvent& event) {
        if (answer.tokens == 0)
            std::cout << "attach reading from=" << endpoints[0] << std::endl;  // kill this router now
        answer.add(event);
    });
    std::cout << answer.text << "\n";
    return "attached=" + std::to_string(journey.attached) + " status=" + code_name(journey.status) + " " +
           answer.summary();
}

}  // namespace

int main(int argc, char** argv) {
    const std::vector<std::pair<std::string, std::string (*)()>> parts = {
        {"health", health},     {"stream", stream}, {"complete", complete}, {"cancel", cancel},
        {"deadline", deadline}, {"errors", errors}, {"attach", attach}};
    if (argc < 2) {
        std::cerr << "usage: client HOST:PORT[,HOST:PORT...] [part ...]\n";
        return 2;
    }
    connect(argv[1]);
    const std::vector<std::string> chosen(argv + 2, argv + argc);
    bool failed = false;
    for (const auto& [name, run] : parts) {
        if (!chosen.empty() && std::find(chosen.begin(), chosen.end(), name) == chosen.end()) continue;
        try {
            const std::string result = run();
            std::cout << name << " ok " << result << std::endl;
        } catch (const std::exception& error) {
            const auto* call = dynamic_cast<const CallError*>(&error);
            const grpc::Status status = call != nullptr ? call->status : grpc::Status(grpc::UNKNOWN, error.what());
            const Explanation told = explain(status);
            std::cout << name << " failed code=" << code_name(status.error_code()) << " reason=" << told.reason
                      << " retry_ms=" << told.retry_ms << " " << error.what() << std::endl;
            failed = true;
        }
    }
    return failed ? 1 : 0;
}
