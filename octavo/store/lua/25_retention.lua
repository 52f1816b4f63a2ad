-- What stays of a sequence that has ended, and for how long. The list `ended` has the ids, the oldest end first, and
-- `kept` those whose records say themselves for how long they are kept. When memory is short, the oldest records go
-- before their time, those of `kept` last, but none within SETTLE_MS of its end: its client may still come back for the
-- last tokens.

local SETTLE_MS = 60 * 1000
local SHORT, ENOUGH = 0.9, 0.85  -- shares of maxmemory: dropping begins at the first, and ends below the second
local FULL = 0.98                -- from this share on the store says that it is full; the server refuses `accept` at 1,
local ROOM_BYTES = 2 ^ 20        -- or if less is left: one long prompt, and the buffer in which it arrives
local MAX_DROPS = 1024           -- per sweep, which takes 8 ms
local DROPS_PER_LOOK = 32        -- how many records are dropped before memory is measured again

-- Removes up to two ids whose records have expired, or live again. Each end adds one id, so the list does not grow for ever.
local function forget_expired(store, list)
  for _ = 1, 2 do
    local id = redis.call('LINDEX', list, 0)
    local state = id and redis.call('HGET', record_key(store, id), 'state')
    if not id or (state and ended({ state = state })) then return end
    redis.call('LPOP', list)
  end
end

-- How long the record is kept after its end, and the list that it is in.
local function retention_of(store, retain_ms)
  local own = tonumber(retain_ms or 0)
  if own > 0 then return own, store.prefix .. 'kept' end
  return store.retain_ms, store.prefix .. 'ended'
end

-- Drops the prompt and its pictures, which only an owner needs, and the room that the journals had to grow. The rest lasts for the retention.
-- Returns how many tokens the journals have.
local function keep_ended(store, rec)
  redis.call('DEL', rec.key .. ':prompt', rec.key .. ':pictures')
  local num_tokens = 0
  local retain_ms, list = retention_of(store, rec.retain_ms)
  for branch = 0, #rec.finishes - 1 do
    local journal = rec.key .. ':' .. branch
    local tokens = redis.call('GET', journal) or ''
    num_tokens = num_tokens + #tokens / 4
    redis.call('SET', journal, tokens, 'PX', retain_ms)
  end
  redis.call('PEXPIRE', rec.key, retain_ms)
  redis.call('PEXPIRE', rec.key .. ':notes', retain_ms)
  redis.call('RPUSH', list, rec.id)
  if redis.call('PTTL', list) < retain_ms then redis.call('PEXPIRE', list, retain_ms) end
  forget_expired(store, list)
  return num_tokens
end

-- How much of maxmemory is used, and how many bytes are left; 0 and infinity if the server has no bound.
local function memory_used()
  local info = redis.call('INFO', 'memory')
  local bound = tonumber(string.match(info, '\nmaxmemory:(%d+)') or 0)
  if bound == 0 then return 0, math.huge end
  local used = tonumber(string.match(info, 'used_memory:(%d+)'))
  return used / bound, bound - used
end

local function drop_all(key, num_branches)
  redis.call('DEL', key, key .. ':notes')
  for branch = 0, num_branches - 1 do redis.call('DEL', journal_of(key, branch)) end
end

-- Drops a record that has ended long enough ago. False if it ended too recently.
local function drop_ended(store, id)
  local key = record_key(store, id)
  local state, finishes, own = unpack(redis.call('HMGET', key, 'state', 'finishes', 'retain_ms'))
  if not state or not ended({ state = state }) then return true end  -- expired; or the id was accepted again
  if redis.call('PTTL', key) > retention_of(store, own) - SETTLE_MS then return false end
  drop_all(key, #finishes)
  return true
end

-- Drops the oldest ended records while memory is short.
local function relieve_memory(store)
  local used = memory_used()
  if used < SHORT then return end
  local drops = 0
  for _, name in ipairs({ 'ended', 'kept' }) do
    local list = store.prefix .. name
    local id = redis.call('LINDEX', list, 0)
    while id and drop_ended(store, id) do
      redis.call('LPOP', list)
      drops = drops + 1
      if drops >= MAX_DROPS or (drops % DROPS_PER_LOOK == 0 and memory_used() < ENOUGH) then return end
      id = redis.call('LINDEX', list, 0)
    end
  end
end

-- KEYS: generation.  Reply: {'OK', 1 if there is memory for a new request, else 0}
define('accepting', function()
  local used, left = memory_used()
  return { 'OK', used < FULL and left > ROOM_BYTES and 1 or 0 }
end, true)
