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

local joined, num_joined = {}, 0  -- by record: the tail of its owner
local lanes = {}                  -- by tail: { began, version, changed = { { version, id }, ... }, left = ids, as a set }
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

local function empty_tail(prefix, owner)
  local tail = tail_of(prefix, owner)
  redis.call('DEL', tail)
  redis.call('SREM', prefix .. 'tails', owner)
  if lanes[tail] then lanes[tail].left = {} end
end

-- Gives all journals their items of the tail, except those of one id if there is one, and empties the tail.
local function settle_all(prefix, owner, except)
  local text, at, found = redis.call('GET', tail_of(prefix, owner)) or '', 1, {}
  if except then found[except] = false end
  while at <= #text do
    local id, branch, first, tokens
    id, branch, first, tokens, at = item_at(text, at)
    local runs = found[id]
    if runs == nil then
      local key = prefix .. 'seq:' .. id
      local rec = redis.call('HMGET', key, 'state', 'owner')  -- what it does not own any more was settled when it lost it
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

local function leave_tail(key)
  local tail = joined[key]
  if not tail then return end
  joined[key], num_joined = nil, num_joined - 1
  lanes[tail].left[id_of(key)] = true
end

-- Takes back a `leave_tail`.
local function stay_in_tail(key, tail)
  joined[key], num_joined = tail, num_joined + 1
  lanes[tail].left[id_of(key)] = nil
end

-- Whether the sequence has joined the tail of its owner now, or before. If it has left this tail before, the tail may hold
-- items of an older record with the same id, which has ended and was dropped: they go.
local function join_tail(prefix, owner, key)
  if joined[key] then return true end
  if num_joined >= MAX_JOINED then return false end
  local tail, id = tail_of(prefix, owner), id_of(key)
  if not lanes[tail] then
    local version = next_version()
    lanes[tail] = { began = version, version = version, changed = {}, left = {} }
  elseif lanes[tail].left[id] then
    settle_all(prefix, owner, id)
  end
  joined[key], num_joined = tail, num_joined + 1
  return true
end

-- The record changes: its owner must be told before it appends again.
local function touch(key)
  local lane = joined[key] and lanes[joined[key]]
  if not lane then return end
  settle(key)
  leave_tail(key)
  lane.version = next_version()
  lane.changed[#lane.changed + 1] = { lane.version, id_of(key) }
end

-- The version up to which a worker knows what has changed; 0 if nothing has joined its tail.
local function version_of(tail) return lanes[tail] and lanes[tail].version or 0 end

-- {'CHANGED', version, the ids of the sequences that have left the tail since this version}; nil if that is not known.
local function changes_since(tail, version)
  local lane = lanes[tail]
  if not lane or version < lane.began then return nil end
  local kept, reply = {}, { 'CHANGED', lane.version }
  for _, change in ipairs(lane.changed) do
    if change[1] > version then kept[#kept + 1], reply[#reply + 1] = change, change[2] end
  end
  lane.changed = kept  -- the worker has been told of the others
  return reply
end
