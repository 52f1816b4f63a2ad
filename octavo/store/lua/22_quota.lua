-- Quotas of tenants, for sequences that were accepted under one: `streams:<tenant>` (the live ones, by the time when they were
-- accepted or their lives renewed) and `spent:<tenant>`, a bucket of tokens: `<level> <at, ms> <full at, ms>`. The level is in parts
-- of a token; it is below 0 after a request that used more than was expected of it. A bucket that is not there is full.
-- The record's field `quota` is `<most streams> <tokens per minute> <tokens that were taken>`; 0: no such limit.

-- What other files call is in one table: a chunk of Lua has room for 200 names.

local quotas = {}

do
  local PARTS = 60000                         -- of a token: a bucket gains as many parts per ms as it gains tokens per minute
  local STREAM_RETRY_MS = 1000                -- nobody knows when a stream will end
  local MAX_DEBT_MS = 30 * 24 * 3600 * 1000   -- a debt is forgotten after that
  local STALE_CHECKS = 64

  local function streams_of(tenant) return 'streams:' .. tenant end

  -- How many streams of the tenant are live. Where they are as many as may be, those that the store has lost do not count.
  local function live_streams(store, tenant, most)
    local key = store.prefix .. streams_of(tenant)
    local count = redis.call('ZCARD', key)
    if count < most then return count end
    for _, id in ipairs(redis.call('ZRANGE', key, 0, STALE_CHECKS - 1)) do
      if redis.call('EXISTS', record_key(store, id)) == 0 then redis.call('ZREM', key, id) end
    end
    return redis.call('ZCARD', key)
  end

  local function level_of(store, tenant, rate, now)
    local level, at, full = unpack(numbers(redis.call('GET', store.prefix .. 'spent:' .. tenant) or nil, 3))
    if full <= now then return rate * PARTS end
    return math.min(rate * PARTS, level + rate * math.max(0, now - at))
  end

  -- Takes tokens out of the bucket; less than 0: puts some back.
  local function draw(store, tenant, rate, tokens, now)
    local key, level = store.prefix .. 'spent:' .. tenant, level_of(store, tenant, rate, now) - tokens * PARTS
    if level >= rate * PARTS then redis.call('DEL', key) return end
    local full_in = math.min(MAX_DEBT_MS, math.ceil((rate * PARTS - level) / rate))
    redis.call('SET', key, packed({ level, now, now + full_in }), 'PX', full_in + 60000)
  end

  local function parse_quota(text) return unpack(numbers(text, 3)) end

  -- What a sequence is expected to use. `output` is the usual one.
  local function expected_use(rec, output) return math.max(1, tonumber(rec.prompt_len) + output) end

  -- The quota that a new sequence would exceed, and in how many ms it may be worth to ask again; nil if there is none. A request
  -- that is larger than a minute's tokens is accepted when the bucket is full.
  function quotas.exceeded(store, rec, output, now)
    if not rec.quota then return nil end
    local streams, rate = parse_quota(rec.quota)
    if streams > 0 and live_streams(store, rec.tenant, streams) >= streams then return 'TENANT_STREAMS', STREAM_RETRY_MS end
    if rate == 0 then return nil end
    local missing = math.min(expected_use(rec, output), rate) * PARTS - level_of(store, rec.tenant, rate, now)
    if missing > 0 then return 'TENANT_RATE', math.ceil(missing / rate) end
    return nil
  end

  -- Counts a new sequence. Returns the record's field.
  function quotas.enter(store, rec, output, now)
    if not rec.quota then return nil end
    local streams, rate = parse_quota(rec.quota)
    if streams > 0 then add_to_index(store, streams_of(rec.tenant), now, rec.id) end
    local taken = rate > 0 and expected_use(rec, output) or 0
    if rate > 0 then draw(store, rec.tenant, rate, taken, now) end
    return packed({ streams, rate, taken })
  end

  -- The sequence lives: so does its entry.
  function quotas.renew(store, rec, now)
    if rec.quota and parse_quota(rec.quota) > 0 then add_to_index(store, streams_of(rec.tenant), now, rec.id) end
  end

  -- The sequence has ended, with `output` tokens, or without ever having an owner (nil).
  function quotas.leave(store, rec, output, now)
    if not rec.quota then return end
    local streams, rate, taken = parse_quota(rec.quota)
    if streams > 0 then drop_from_index(store, streams_of(rec.tenant), rec.id) end
    if rate > 0 then draw(store, rec.tenant, rate, (output and expected_use(rec, output) or 0) - taken, now) end
  end
end
