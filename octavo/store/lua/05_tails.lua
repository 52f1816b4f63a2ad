-- Tails: one string per worker, into which it writes the tokens of all its sequences at once.
--
-- An append to a journal costs the same for one token as for a hundred, so a worker appends to its tail instead, and to the
-- journals only now and then (a checkpoint, which empties the tail). An item of a tail is
-- <u8 bytes of the id><id><u16 branch><u32 first index><u32 count><tokens>.
--
-- A sequence joins the tail of its owner with an append to its journal that was answered OK. Items of the sequences that
-- have joined need no check of any record: as soon as anything else changes such a record, the sequence leaves the tail, and
-- the owner is told so instead of having its next items written (see `append_tail`).
--
-- A journal gets its items of the tail (it is settled) before anyone reads or changes it. Items that a journal has already
-- are passed over, so the order of settling and checkpoints does not matter, nor does a call that comes twice or late.
--
-- Who has joined is known to this server process alone. A process that begins settles all tails that it finds in the data,
-- and has every worker begin anew.

local ALIVE_MS = 24 * 3600 * 1000  -- how long the keys of a live sequence and of the indexes last; sweeps renew it
local MAX_JOINED = 65536
local MAX_LEFT = 1024  -- ids that have left a tail since it was emptied. With more it is emptied at the next join

-- What this process knows of each tail:
--   version  grows whenever a sequence leaves the tail because something has changed its record
--   since    the version from which on `changed` is complete: { { version, id of the sequence that left }, ... }
--   left     the ids that have left the tail since it was emptied, as a set of num_left: their items are settled
--   emptied  how many bytes it has had before it was emptied last. With the bytes that it has, it never is the same again
local lanes = {}                  -- by tail
local joined, num_joined = {}, 0  -- by record: the tail of its owner
local last_version = 0

-- Greater than all versions before, also those of the process before this one.
local function next_version()
  if last_version == 0 then
    local time = redis.call('TIME')
    last_version = 1000000 * tonumber(time[1]) + tonumber(time[2])
  end
  last_version = last_version + 1
  return last_version
end

local function id_of(key) return string.match(key, '([^:]+)$') end
local function journal_of(key, branch) return key .. ':' .. branch end
local function tail_of(prefix, owner) return prefix .. 'tail:' .. owner end

local function mark_of(key)
  local id = id_of(key)
  return string.char(#id) .. id
end

-- The item at this place: id, branch, first index, tokens, and where the next one begins.
local function item_at(text, at)
  local id, branch, first, count, tokens_at = struct.unpack('<Bc0I2I4I4', text, at)
  local next_at = tokens_at + 4 * count
  return id, branch, first, string.sub(text, tokens_at, next_at - 1), next_at
end

-- What the journals of a record get. `add` passes over tokens that a journal has already.
local function begin_runs(key) return { key = key } end

local function add(runs, branch, first, tokens)
  local run = runs[branch]
  if not run then
    run = { length = redis.call('STRLEN', journal_of(runs.key, branch)) / 4 }
    runs[branch] = run
  end
  local stop = first + #tokens / 4
  if first <= run.length and run.length < stop then
    run[#run + 1] = string.sub(tokens, 4 * (run.length - first) + 1)
    run.length = stop
  end
end

local function write_runs(runs)
  for branch, run in pairs(runs) do
    if branch ~= 'key' and run[1] then redis.call('APPEND', journal_of(runs.key, branch), table.concat(run)) end
  end
end

-- Gives the journals of this record their items of the tail. Whoever reads a journal calls it first.
local function settle(key)
  local text = joined[key] and redis.call('GET', joined[key])
  if not text then return end
  local mark, runs = mark_of(key), begin_runs(key)
  local at = string.find(text, mark, 1, true)
  while at do
    local _, branch, first, tokens, next_at = item_at(text, at)
    add(runs, branch, first, tokens)
    at = string.find(text, mark, next_at, true)
  end
  write_runs(runs)
end

-- Where a tail ends, counted from the first byte that it ever had.
local function end_of(tail) return lanes[tail].emptied + redis.call('STRLEN', tail) end

local function empty_tail(prefix, owner)
  local tail = tail_of(prefix, owner)
  local lane = lanes[tail]
  if lane then lane.emptied, lane.left, lane.num_left = end_of(tail), {}, 0 end
  redis.call('DEL', tail)
  redis.call('SREM', prefix .. 'tails', owner)
end

-- Gives all journals their items of the tail, and empties the tail. What the owner does not own any more, or what has left
-- the tail, was settled then: items of it that are still there may be those of an older record with the same id.
local function settle_all(prefix, owner)
  local tail = tail_of(prefix, owner)
  local text, at, found = redis.call('GET', tail) or '', 1, {}
  local left = lanes[tail] and lanes[tail].left or {}
  while at <= #text do
    local id, branch, first, tokens
    id, branch, first, tokens, at = item_at(text, at)
    local runs = found[id]
    if runs == nil then
      local key = prefix .. 'seq:' .. id
      local rec = left[id] and {} or redis.call('HMGET', key, 'state', 'owner')
      runs = rec[1] == 'RUNNING' and rec[2] == owner and begin_runs(key)
      found[id] = runs
    end
    if runs then add(runs, branch, first, tokens) end
  end
  for _, runs in pairs(found) do
    if runs then write_runs(runs) end
  end
  empty_tail(prefix, owner)
end

-- Forgets who has joined, because this process has not served these data, or not all of them.
local function begin_tails(prefix)
  joined, num_joined, lanes = {}, 0, {}
  for _, owner in ipairs(redis.call('SMEMBERS', prefix .. 'tails')) do settle_all(prefix, owner) end
end

-- Renews the life of the tail of a worker that lives.
local function renew_tail(prefix, owner)
  redis.call('PEXPIRE', tail_of(prefix, owner), ALIVE_MS)
  redis.call('PEXPIRE', prefix .. 'tails', ALIVE_MS)
end

-- Removes the tail of a worker that owns nothing and seems dead. If it lives, it begins anew.
local function remove_tail(prefix, owner)
  settle_all(prefix, owner)
  lanes[tail_of(prefix, owner)] = nil
end

-- Returns what is known of the tail that the sequence had joined, if anything is.
local function leave_tail(key)
  local tail = joined[key]
  local lane = lanes[tail]
  if tail then joined[key], num_joined = nil, num_joined - 1 end
  if lane then lane.left[id_of(key)], lane.num_left = true, lane.num_left + 1 end
  return lane
end

-- Takes back a `leave_tail`.
local function stay_in_tail(key, tail)
  local lane, id = lanes[tail], id_of(key)
  joined[key], num_joined = tail, num_joined + 1
  lane.left[id], lane.num_left = nil, lane.num_left - 1
end

-- Whether the sequence has joined the tail of its owner now, or before. A tail that it has left before is emptied: it may
-- hold items of an older record with the same id, which has ended and was dropped.
local function join_tail(prefix, owner, key)
  if joined[key] then return true end
  if num_joined >= MAX_JOINED then return false end
  local tail = tail_of(prefix, owner)
  local lane = lanes[tail]
  if not lane then
    local version = next_version()
    lanes[tail] = { version = version, since = version, changed = {}, left = {}, num_left = 0, emptied = version }
  elseif lane.left[id_of(key)] or lane.num_left >= MAX_LEFT then
    settle_all(prefix, owner)
  end
  joined[key], num_joined = tail, num_joined + 1
  return true
end

-- The record changes: its owner must be told before it appends again.
local function touch(key)
  if not joined[key] then return end
  settle(key)
  local lane = leave_tail(key)
  if not lane then return end
  lane.version = next_version()
  lane.changed[#lane.changed + 1] = { lane.version, id_of(key) }
end

-- The version up to which a worker knows what has changed; 0 if nothing has joined its tail.
local function version_of(tail) return lanes[tail] and lanes[tail].version or 0 end

-- {'CHANGED', version, the ids of the sequences that have left the tail since this version}; nil if that is not known.
-- A version above that of the tail is one of an earlier process, whose clock was ahead.
local function changes_since(tail, version)
  local lane = lanes[tail]
  if not lane or version < lane.since or version > lane.version then return nil end
  local kept, reply = {}, { 'CHANGED', lane.version }
  for _, change in ipairs(lane.changed) do
    if change[1] > version then kept[#kept + 1], reply[#reply + 1] = change, change[2] end
  end
  lane.changed, lane.since = kept, version  -- the worker has been told of the others
  return reply
end
