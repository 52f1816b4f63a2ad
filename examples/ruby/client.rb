# What an application does with octavo, in Ruby: make run ENDPOINTS=127.0.0.1:50051,127.0.0.1:50052
# Each part below prints one line at its end. ../README.md says what the lines mean.
require 'securerandom'
require 'grpc'
require 'grpc/health/v1/health_services_pb'
require 'google/protobuf/well_known_types' # Any#unpack, Duration#to_f
require 'google/rpc/error_details_pb'
require 'google/rpc/status_pb'
require 'octavo/v1/inference_services_pb'

V1 = Octavo::V1
Codes = GRPC::Core::StatusCodes
MAX_FAILURES = 600 # without an event between them; with the pauses after them about five minutes
CODE_NAMES = Codes.constants.to_h { |name| [Codes.const_get(name), name.to_s] }
OPTIONS = {
  'grpc.service_config' => File.read(File.join(__dir__, '../../protos/service_config.json')),
  'grpc.keepalive_time_ms' => 1_000, # notices within 3 s a router that hangs or vanished without a word
  'grpc.keepalive_timeout_ms' => 2_000,
  'grpc.http2.ping_timeout_ms' => 2_000, # later versions wait this long, and 60 s by default
  'grpc.http2.max_pings_without_data' => 0,
  'grpc.initial_reconnect_backoff_ms' => 100,
  'grpc.max_reconnect_backoff_ms' => 1_000
}.freeze

# The routers, and one stub for each.
class Routers
  attr_reader :endpoints, :stubs

  def initialize(endpoints)
    @endpoints = endpoints
    @stubs = endpoints.map { |it| V1::Inference::Stub.new(it, :this_channel_is_insecure, channel_args: OPTIONS) }
  end

  def first = @stubs.first
end

# A request for so many tokens. It has an id of its own, so that it can be sent twice and runs once.
def new_request(text, max_tokens, **sampling)
  params = V1::SamplingParams.new(temperature: 0, max_tokens: max_tokens, ignore_eos: true, **sampling)
  V1::GenerateRequest.new(request_id: SecureRandom.uuid, text: text, sampling: params)
end

# What octavo says of a failed call: the details of google.rpc.Status, if there are any. Without a reason, no router
# said this: the connection broke, or a proxy answered.
Explanation = Struct.new(:code, :reason, :fields, :retry_s) do
  # Whether another router may go on with the stream: this one is gone, is going, or has no room for it.
  def elsewhere?
    return [Codes::UNAVAILABLE, Codes::RESOURCE_EXHAUSTED].include?(code) unless reason.empty?

    [Codes::UNAVAILABLE, Codes::INTERNAL, Codes::UNKNOWN, Codes::CANCELLED].include?(code)
  end
end

def explain(error)
  told = Explanation.new(error.code, '', [], 0.0)
  rich = error.to_rpc_status # decodes grpc-status-details-bin
  (rich ? rich.details : []).each do |detail|
    if (info = detail.unpack(Google::Rpc::ErrorInfo))
      told.reason = info.reason
    elsif (bad = detail.unpack(Google::Rpc::BadRequest))
      told.fields = bad.field_violations.map(&:field)
    elsif (pause = detail.unpack(Google::Rpc::RetryInfo))
      told.retry_s = pause.retry_delay.to_f
    end
  end
  told
end

# How a stream went: how often it was attached again, and which status ended the connection before.
Journey = Struct.new(:attached, :status)

# Yields every event of a request, once and in order, over as many routers as it takes.
def follow(routers, request, deadline: nil)
  journey = Journey.new(0, Codes::OK)
  place = nil # after the last event that was yielded
  next_index = 0
  failures = 0 # since the last event
  (0..).each do |attempt|
    stub = routers.stubs[attempt % routers.stubs.size]
    options = { deadline: deadline, return_op: true }
    call = place ? stub.attach(place, **options) : stub.generate(request, **options)
    told = Explanation.new(Codes::OK, '', [], 0.0) # an end without `finished` is none
    begin
      call.execute.each do |event|
        yield event
        place = V1::AttachRequest.new(resume_token: event.resume_token)
        next_index = event.first_index + event.token_ids.size
        failures = 0
        return journey if event.finished
      end
    rescue GRPC::BadStatus => e
      told = explain(e)
      if told.code == Codes::DEADLINE_EXCEEDED && place && deadline
        deadline = nil # the call has ended with the request: fetch its last tokens
      elsif told.reason == 'FOREIGN_TOKEN' # the store was lost, and the key of tokens with it
        place = V1::AttachRequest.new(request_id: request.request_id, next_indexes: [next_index])
      elsif !told.elsewhere? || failures > MAX_FAILURES
        raise
      end
    ensure
      call.cancel
    end
    journey.status = told.code
    sleep(told.retry_s + rand * [1.0, 0.05 * 2**failures].min)
    failures += 1
    journey.attached += 1 if place
  end
end

# It grows. Each token has an index: a lost one or a double one cannot go unnoticed.
class Answer
  attr_reader :tokens, :text

  def initialize
    @tokens = 0
    @text = +''
    @finish = ''
  end

  def add(event)
    raise "token #{event.first_index} came, #{@tokens} is due" if event.first_index != @tokens

    @tokens += event.token_ids.size
    @text << event.text
    @finish = finish_name(event.finish_reason) if event.finish_reason != :FINISH_REASON_UNSPECIFIED
    raise event.finished.failure.message if event.finished&.failure
  end

  def to_s = "tokens=#{@tokens} finish=#{@finish}"
end

def finish_name(reason) = reason.to_s.delete_prefix('FINISH_REASON_')

PARTS = {
  'health' => lambda do |routers|
    stub = Grpc::Health::V1::Health::Stub.new(routers.endpoints.first, :this_channel_is_insecure, channel_args: OPTIONS)
    reply = stub.check(Grpc::Health::V1::HealthCheckRequest.new(service: 'octavo.v1.Inference'))
    "status=#{reply.status}"
  end,

  'stream' => lambda do |routers|
    answer = Answer.new
    follow(routers, new_request('Once upon a time', 24)) do |event|
      answer.add(event)
      print event.text
    end
    puts
    answer.to_s
  end,

  'complete' => lambda do |routers|
    reply = routers.first.complete(new_request('Il était une fois', 24))
    output = reply.outputs.first
    puts output.text
    "prompt_tokens=#{reply.usage.prompt_tokens} tokens=#{output.token_ids.size} finish=#{finish_name(output.finish_reason)}"
  end,

  'cancel' => lambda do |routers|
    answer = Answer.new
    request = new_request('Count for ever: 1, 2, 3,', 1000)
    follow(routers, request) do |event|
      routers.first.cancel(V1::CancelRequest.new(request_id: request.request_id)) if answer.tokens.zero?
      answer.add(event)
    end
    answer.to_s
  end,

  'deadline' => lambda do |routers|
    answer = Answer.new
    follow(routers, new_request('Count for ever: 1, 2, 3,', 1000), deadline: Time.now + 1) { |event| answer.add(event) }
    answer.to_s
  end,

  'errors' => lambda do |routers|
    routers.first.complete(new_request('Hello', 1, temperature: -1, top_p: 2))
    raise 'two wrong fields were accepted'
  rescue GRPC::BadStatus => e
    told = explain(e)
    "code=#{CODE_NAMES[told.code]} reason=#{told.reason} fields=#{told.fields.join(',')}"
  end,

  'attach' => lambda do |routers|
    answer = Answer.new
    journey = follow(routers, new_request('The story of a router:', 1000)) do |event|
      puts "attach reading from=#{routers.endpoints.first}" if answer.tokens.zero? # kill this router now
      answer.add(event)
    end
    puts answer.text
    "attached=#{journey.attached} status=#{CODE_NAMES[journey.status]} #{answer}"
  end
}.freeze

abort 'usage: client.rb HOST:PORT[,HOST:PORT…] [part …]' if ARGV.empty?
$stdout.sync = true
routers = Routers.new(ARGV[0].split(','))
chosen = ARGV.drop(1)
failed = false
PARTS.each do |name, part|
  next unless chosen.empty? || chosen.include?(name)

  begin
    puts "#{name} ok #{part.call(routers)}"
  rescue GRPC::BadStatus => e
    told = explain(e)
    values = "code=#{CODE_NAMES[told.code]} reason=#{told.reason} retry_ms=#{(told.retry_s * 1000).round}"
    puts "#{name} failed #{values} #{e.details}"
    failed = true
  rescue RuntimeError => e
    puts "#{name} failed code=UNKNOWN reason= retry_ms=0 #{e.message}"
    failed = true
  end
end
exit(failed ? 1 : 0)
