// What an application does with octavo, in Go: make run ENDPOINTS=127.0.0.1:50051,127.0.0.1:50052
// Each part below prints one line at its end. ../README.md says what the lines mean.
package main

import (
	"context"
	"fmt"
	"io"
	"math/rand"
	"os"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	health "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	octavo "octavo/v1"
)

// Without an event between them; with the pauses after them about five minutes.
const maxFailures = 600

var (
	endpoints   []string
	connections []*grpc.ClientConn
	routers     []octavo.InferenceClient
)

func connect(list string) error {
	serviceConfig, err := os.ReadFile(os.Getenv("SERVICE_CONFIG")) // protos/service_config.json
	if err != nil {
		return err
	}
	endpoints = strings.Split(list, ",")
	for _, endpoint := range endpoints {
		connection, err := grpc.Dial(endpoint,
			grpc.WithInsecure(),
			grpc.WithDefaultServiceConfig(string(serviceConfig)),
			// Notices a router that vanished without a word.
			grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 3 * time.Second}))
		if err != nil {
			return err
		}
		connections = append(connections, connection)
		routers = append(routers, octavo.NewInferenceClient(connection))
	}
	return nil
}

// newRequest asks for maxTokens tokens. It has an id of its own, so that it can be sent twice and runs once.
func newRequest(text string, maxTokens uint32) *octavo.GenerateRequest {
	return &octavo.GenerateRequest{
		RequestId: proto.String(fmt.Sprintf("go-%x-%x", rand.Uint64(), rand.Uint64())),
		Input:     &octavo.GenerateRequest_Text{Text: text},
		Sampling: &octavo.SamplingParams{
			Temperature: proto.Float32(0), MaxTokens: proto.Uint32(maxTokens), IgnoreEos: proto.Bool(true),
		},
	}
}

// explanation is what octavo says of a failed call: the details of google.rpc.Status, if there are any.
type explanation struct {
	code   codes.Code
	reason string // empty: no router said this; the connection broke, or a proxy answered
	fields []string
	retry  time.Duration
}

func explain(err error) explanation {
	told := explanation{code: status.Code(err)}
	for _, detail := range status.Convert(err).Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			told.reason = detail.Reason
		case *errdetails.BadRequest:
			for _, violation := range detail.FieldViolations {
				told.fields = append(told.fields, violation.Field)
			}
		case *errdetails.RetryInfo:
			told.retry = detail.RetryDelay.AsDuration()
		}
	}
	return told
}

func codeName(number codes.Code) string { return code.Code_name[int32(number)] }

func finishName(reason octavo.FinishReason) string {
	return strings.TrimPrefix(reason.String(), "FINISH_REASON_")
}

// elsewhere says whether another router may go on with the stream: this one is gone, is going, or has no room for it.
func elsewhere(err error) bool {
	told := explain(err)
	switch told.code {
	case codes.Unavailable:
		return true
	case codes.ResourceExhausted:
		return told.reason != ""
	case codes.Internal, codes.Unknown, codes.Canceled:
		return told.reason == ""
	}
	return false
}

// journey is how a stream went: how often it was attached again, and which status ended the connection before.
type journey struct {
	attached int
	status   codes.Code
}

type eventStream interface {
	Recv() (*octavo.GenerateEvent, error)
}

// follow calls use with every event of a request, once and in order, over as many routers as it takes.
func follow(ctx context.Context, request *octavo.GenerateRequest, use func(*octavo.GenerateEvent) error) (journey, error) {
	var went journey
	var at place
	for attempt := 0; ; attempt++ {
		err := at.read(ctx, routers[attempt%len(routers)], request, use)
		if err == nil {
			return went, nil
		}
		told := explain(err)
		if err == io.EOF {
			told.code = codes.OK // an end without Finished is none
		}
		if told.code == codes.DeadlineExceeded && at.attach != nil && ctx.Err() != nil {
			ctx = context.Background() // the call has ended with the request: fetch its last tokens
		} else if told.reason == "FOREIGN_TOKEN" { // the store was lost, and the key of tokens with it
			id := &octavo.AttachRequest_RequestId{RequestId: request.GetRequestId()}
			at.attach = &octavo.AttachRequest{At: id, NextIndexes: []uint32{at.nextIndex}}
		} else if err != io.EOF && (!elsewhere(err) || at.failures > maxFailures) {
			return went, err
		}
		went.status = told.code
		bound := 50 * time.Millisecond << at.failures
		if bound > time.Second || bound <= 0 {
			bound = time.Second
		}
		time.Sleep(told.retry + time.Duration(rand.Int63n(int64(bound))))
		at.failures++
		if at.attach != nil {
			went.attached++
		}
	}
}

// place is where a stream goes on: after the last event that was used.
type place struct {
	attach    *octavo.AttachRequest // nil: no event has come
	nextIndex uint32
	failures  uint // since that event
}

// read is one connection of follow. It returns nil after the terminal event.
func (at *place) read(ctx context.Context, router octavo.InferenceClient, request *octavo.GenerateRequest,
	use func(*octavo.GenerateEvent) error) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop() // cancels a call that has not ended
	var stream eventStream
	var err error
	if at.attach == nil {
		stream, err = router.Generate(ctx, request)
	} else {
		stream, err = router.Attach(ctx, at.attach)
	}
	for err == nil {
		var event *octavo.GenerateEvent
		if event, err = stream.Recv(); err != nil {
			break
		}
		if failed := use(event); failed != nil {
			return status.Error(codes.Aborted, failed.Error())
		}
		token := &octavo.AttachRequest_ResumeToken{ResumeToken: event.ResumeToken}
		at.attach, at.nextIndex = &octavo.AttachRequest{At: token}, event.FirstIndex+uint32(len(event.TokenIds))
		at.failures = 0
		if event.Finished != nil {
			return nil
		}
	}
	return err
}

// answer grows. Each token has an index: a lost one or a double one cannot go unnoticed.
type answer struct {
	tokens uint32
	text   strings.Builder
	finish string
}

func (a *answer) add(event *octavo.GenerateEvent) error {
	if event.FirstIndex != a.tokens {
		return fmt.Errorf("token %d came, %d is due", event.FirstIndex, a.tokens)
	}
	a.tokens += uint32(len(event.TokenIds))
	a.text.WriteString(event.Text)
	if event.FinishReason != octavo.FinishReason_FINISH_REASON_UNSPECIFIED {
		a.finish = finishName(event.FinishReason)
	}
	if failure := event.GetFinished().GetFailure(); failure != nil {
		return fmt.Errorf("%s", failure.Message)
	}
	return nil
}

func (a *answer) summary() string { return fmt.Sprintf("tokens=%d finish=%s", a.tokens, a.finish) }

func checkHealth() (string, error) {
	reply, err := health.NewHealthClient(connections[0]).Check(context.Background(),
		&health.HealthCheckRequest{Service: "octavo.v1.Inference"})
	return "status=" + reply.GetStatus().String(), err
}

func stream() (string, error) {
	var all answer
	_, err := follow(context.Background(), newRequest("Once upon a time", 24), func(event *octavo.GenerateEvent) error {
		fmt.Print(event.Text)
		return all.add(event)
	})
	fmt.Println()
	return all.summary(), err
}

func complete() (string, error) {
	reply, err := routers[0].Complete(context.Background(), newRequest("Il était une fois", 24))
	if err != nil {
		return "", err
	}
	output := reply.Outputs[0]
	fmt.Println(output.Text)
	return fmt.Sprintf("prompt_tokens=%d tokens=%d finish=%s",
		reply.Usage.PromptTokens, len(output.TokenIds), finishName(output.FinishReason)), nil
}

func cancel() (string, error) {
	var all answer
	request := newRequest("Count for ever: 1, 2, 3,", 1000)
	_, err := follow(context.Background(), request, func(event *octavo.GenerateEvent) error {
		if all.tokens == 0 {
			what := &octavo.CancelRequest{RequestId: request.GetRequestId()}
			if _, err := routers[0].Cancel(context.Background(), what); err != nil {
				return err
			}
		}
		return all.add(event)
	})
	return all.summary(), err
}

func deadline() (string, error) {
	var all answer
	ctx, stop := context.WithTimeout(context.Background(), time.Second)
	defer stop()
	_, err := follow(ctx, newRequest("Count for ever: 1, 2, 3,", 1000), all.add)
	return all.summary(), err
}

func errors() (string, error) {
	wrong := newRequest("Hello", 1)
	wrong.Sampling.Temperature, wrong.Sampling.TopP = proto.Float32(-1), proto.Float32(2)
	_, err := routers[0].Complete(context.Background(), wrong)
	told := explain(err)
	return fmt.Sprintf("code=%s reason=%s fields=%s", codeName(told.code), told.reason, strings.Join(told.fields, ",")), nil
}

func attach() (string, error) {
	var all answer
	went, err := follow(context.Background(), newRequest("The story of a router:", 1000), func(event *octavo.GenerateEvent) error {
		if all.tokens == 0 {
			fmt.Println("attach reading from=" + endpoints[0]) // kill this router now
		}
		return all.add(event)
	})
	fmt.Println(all.text.String())
	return fmt.Sprintf("attached=%d status=%s %s", went.attached, codeName(went.status), all.summary()), err
}

func main() {
	parts := []struct {
		name string
		run  func() (string, error)
	}{
		{"health", checkHealth}, {"stream", stream}, {"complete", complete}, {"cancel", cancel},
		{"deadline", deadline}, {"errors", errors}, {"attach", attach},
	}
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: client HOST:PORT[,HOST:PORT...] [part ...]")
		os.Exit(2)
	}
	rand.Seed(time.Now().UnixNano())
	if err := connect(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	chosen := " " + strings.Join(os.Args[2:], " ") + " "
	failed := false
	for _, part := range parts {
		if len(os.Args) > 2 && !strings.Contains(chosen, " "+part.name+" ") {
			continue
		}
		line, err := part.run()
		if err == nil {
			fmt.Println(part.name, "ok", line)
			continue
		}
		told := explain(err)
		fmt.Printf("%s failed code=%s reason=%s retry_ms=%d %s\n",
			part.name, codeName(told.code), told.reason, told.retry.Milliseconds(), status.Convert(err).Message())
		failed = true
	}
	if failed {
		os.Exit(1)
	}
}
