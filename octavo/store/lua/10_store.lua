-- What every function begins with, and the helpers that several functions share.
--
-- Calling convention of all functions:
--   KEYS[1]  the generation key, octavo:gen; the functions derive all other keys from it
--   KEYS[2]  the sequence's record, octavo:seq:<id>, if the function is about one sequence
--   ARGV[1]  the generation that the caller knows
--   ARGV[2]  how long ended sequences are kept, in ms
--   ARGV[3]  and on: the function's own arguments, which its comment names as a
--   reply    an array that starts with a status; {'STALE_GENERATION', generation} means that nothing was done

local GENERATION_MS = 30 * 24 * 3600 * 1000  -- how long the generation key lasts; heartbeats renew it
local LEASE_LINGER_MS = 60 * 1000            -- how much longer than its lease a lease key lasts
local FREEZE_MARGIN_MS = 1000                -- how much longer than the longest lease take-overs freeze after a restart
local RENEWALS_PER_LEASE = 3                 -- how often a member renews its lease within the lease
local LATE_RENEWAL_MS = 200                  -- how late a renewal may come before it counts as missed
local OVERDUE_MS = 2000                      -- how long after its deadline a sweep ends a running sequence
local MAX_TIMELINE = 32
local MAX_EXPIRED_PER_POP = 64
local RENEW_MS = 60 * 1000                   -- how often the life of an index that is in use is renewed
local MAX_RENEWED = 4096

local CUT = { STOP = '1', LENGTH = '2' }
local STOPPED = { CANCELLED = '3', DEADLINE = '4', ERROR = '5' }  -- digits of FinishReason; '0' means that the branch runs

-- The fields that a record has not, because nothing has changed them since it was accepted.
local DEFAULTS = {
  epoch = '0', owner = '', take_id = '', alone = '0', mig_number = '0', mig_to = '', last_mig = '0', deadline_ms = '0',
  detached_since_ms = '0', cancel = '0', failure = '', crashes = '0', suspects = '', first_crash_ms = '0', announced = '0',
  numerics = '', numerics_changes = '0', proof = '0', best = '0', pardons = '0', retain_ms = '0', pictures = '',
}
local DEFAULTED = { __index = DEFAULTS }

-- The time at which the call under way began.
local clock_ms, began_ms = now_ms, nil
local function now_ms()
  began_ms = began_ms or clock_ms()
  return began_ms
end

-- The run id of the server process, and the generation that it serves. Both are empty after every restart.
local run_id
local served

-- Begins a generation above `floor`. It starts from the clock, so that it grows even when all data is lost.
local function begin_generation(generation_key, floor, frozen)
  local generation = math.max(floor + 1, math.floor(now_ms() / 1000))
  local raw = string.format('%.0f %s %.0f', generation, run_id, frozen)
  redis.call('SET', generation_key, raw, 'PX', GENERATION_MS)
  return generation, raw
end

-- How long take-overs freeze after a restart: every member with a lease must have had the time to renew it.
local function freeze_ms(prefix)
  return tonumber(redis.call('GET', prefix .. 'longest-lease') or 0) + FREEZE_MARGIN_MS
end

-- The generation that the server serves, with the prefix of its keys. The first call begins a new generation after the
-- server's process has changed (by a restart, or by the promotion of a replica). So does a call that knows a newer generation than the data do: then the
-- data are older than the caller, as those of a replica that lagged behind.
local function enter(generation_key, args)
  local raw = redis.call('GET', generation_key)
  local store, told = served, tonumber(args[1])
  if not store or store.raw ~= raw or told > store.generation then
    run_id = run_id or string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
    local prefix = string.sub(generation_key, 1, -4)
    local generation, writer, frozen = string.match(raw or '', '^(%d+) (%x+) (%d+)$')
    generation, frozen = tonumber(generation or 0), tonumber(frozen or 0)
    if writer ~= run_id or told > generation then
      frozen = generation > 0 and now_ms() + freeze_ms(prefix) or 0
      generation, raw = begin_generation(generation_key, math.max(generation, told), frozen)
    end
    store = { raw = raw, generation = generation, frozen_until = frozen, prefix = prefix }
    served = store
    begin_tails(prefix)
  end
  store.retain_ms = tonumber(args[2])
  return store
end

-- Registers body(store, keys, a1, a2, ...). Functions that sequences need which were accepted before are `essential`: they
-- run even when the server has used up its maxmemory.
local function define(name, body, essential)
  redis.register_function{
    function_name = 'octavo1_' .. name,
    flags = essential and { 'allow-oom' } or {},
    callback = function(keys, args)
      began_ms = nil
      local store = enter(keys[1], args)
      if store.generation ~= tonumber(args[1]) then return { 'STALE_GENERATION', store.generation } end
      return body(store, keys, unpack(args, 3))
    end,
  }
end

local function record_key(store, id) return store.prefix .. 'seq:' .. id end

-- The record as a table of strings, and as a list of fields and values; or nil.
local function fetch(key)
  local flat = redis.call('HGETALL', key)
  if #flat == 0 then return nil end
  local rec = setmetatable({ key = key, id = id_of(key) }, DEFAULTED)
  for i = 1, #flat, 2 do rec[flat[i]] = flat[i + 1] end
  return rec, flat
end

-- The values of some fields of the record, in this order; the first one is nil if there is no record.
local function fetch_fields(key, state, ...)
  local names, values = { ... }, redis.call('HMGET', key, state, ...)
  if not values[1] then return nil end
  for i, name in ipairs(names) do values[i + 1] = values[i + 1] or DEFAULTS[name] end
  return unpack(values)
end

-- Writes fields to the record and to its table.
local function update(rec, fields)
  touch(rec.key)
  local flat = {}
  for name, value in pairs(fields) do
    rec[name] = tostring(value)
    flat[#flat + 1], flat[#flat + 2] = name, value
  end
  redis.call('HSET', rec.key, unpack(flat))
end

local function ended(rec) return rec.state ~= 'QUEUED' and rec.state ~= 'RUNNING' end

local function journal_length(rec, branch)
  settle(rec.key)
  return redis.call('STRLEN', journal_of(rec.key, branch)) / 4
end

local function expire_all(rec, ms)
  redis.call('PEXPIRE', rec.key, ms)
  redis.call('PEXPIRE', rec.key .. ':prompt', ms)
  redis.call('PEXPIRE', rec.key .. ':notes', ms)
  if rec.pictures ~= '' then redis.call('PEXPIRE', rec.key .. ':pictures', ms) end
  for branch = 0, #rec.finishes - 1 do redis.call('PEXPIRE', rec.key .. ':' .. branch, ms) end
end

-- The timeline with one more line "<ms after acceptance> <what> <detail>", and without the oldest if there are too many.
local function timeline_with(rec, now, line)
  line = string.format('%.0f %s', now - tonumber(rec.accepted_ms), line)
  local lines = rec.timeline == '' and line or rec.timeline .. '\n' .. line
  local _, breaks = string.gsub(lines, '\n', '')
  if breaks >= MAX_TIMELINE then lines = string.match(lines, '^[^\n]*\n(.*)$') end
  return lines
end

-- A line of a timeline with what a program has seen, if it says so.
local function with_seen(line, seen) return (seen or '') == '' and line or line .. ' ' .. seen end

local function note(rec, now, what, detail) update(rec, { timeline = timeline_with(rec, now, what .. ' ' .. detail) }) end

-- Tells the routers that clients are attached to. The notice may get lost, so routers also poll.
local function notify(rec, what)
  local notice = table.concat({ rec.id, what, rec.epoch, rec.owner }, ' ')
  for router in string.gmatch(rec.routers, '[^,]+') do redis.call('PUBLISH', 'octavo:notice:' .. router, notice) end
end

-- When this process has renewed the life of which key.
local renewed, num_renewed = {}, 0

-- The indexes: sorted sets of sequences, so that nobody needs to look at all that are alive.
--   live               every live sequence, by the time when its keys' lives must be renewed
--   owned:<worker>     what a worker owns, by its place in the queue
--   attached:<router>  the sequences whose client is attached to a router, by their places in the queue
--   deadlines          live sequences with a deadline, by the time when a sweep ends them
--   detached           live sequences without a client that end for that, by the time from which the grace counts
-- A member of `owned` and `attached` is a member of members:<kind>, too, so that a sweep finds what the dead leave behind.

-- Renews the life of a key that is in use, unless this process did so within the last minute.
local function renew(key)
  local now = now_ms()
  if now - (renewed[key] or 0) < RENEW_MS then return end
  if num_renewed >= MAX_RENEWED then renewed, num_renewed = {}, 0 end
  if not renewed[key] then num_renewed = num_renewed + 1 end
  renewed[key] = now
  redis.call('PEXPIRE', key, ALIVE_MS)
end

-- True if the index was empty: an empty one does not exist.
local function add_to_index(store, name, score, id)
  local key = store.prefix .. name
  local first = redis.call('ZADD', key, score, id) == 1 and redis.call('ZCARD', key) == 1
  if first then redis.call('PEXPIRE', key, ALIVE_MS) else renew(key) end
  return first
end

local function drop_from_index(store, name, id) redis.call('ZREM', store.prefix .. name, id) end

-- Enters the sequence among those of a member. A member that the store does not know counts as dead.
local function give_to(store, rec, index, kind, member)
  if member == '' then return end
  if not add_to_index(store, index .. ':' .. member, rec.place, rec.id) then return end
  local members = store.prefix .. 'members:' .. kind  -- heartbeats renew its life
  if redis.call('ZADD', members, 'NX', 0, member) == 1 then redis.call('PEXPIRE', members, ALIVE_MS) end
end

-- Enters the sequence among those of its new owner. The caller writes the owner into the record.
local function move_to_owner(store, rec, owner)
  if rec.owner ~= '' then drop_from_index(store, 'owned:' .. rec.owner, rec.id) end
  give_to(store, rec, 'owned', 'worker', owner)
end

-- What waits ends at its deadline. What runs ends OVERDUE_MS later: its owner should have ended it by then.
local function ends_at(rec) return tonumber(rec.deadline_ms) + (rec.state == 'RUNNING' and OVERDUE_MS or 0) end

-- A sequence that runs by now may stand in the index with the time when it would have ended as a waiting one.
local function set_deadline(store, rec)
  if rec.deadline_ms ~= '0' then add_to_index(store, 'deadlines', ends_at(rec), rec.id) end
end

local function forget_indexes(store, rec)
  drop_from_index(store, 'live', rec.id)
  if rec.deadline_ms ~= '0' then drop_from_index(store, 'deadlines', rec.id) end
  if rec.detached_since_ms ~= '0' then drop_from_index(store, 'detached', rec.id) end
  if rec.owner ~= '' then drop_from_index(store, 'owned:' .. rec.owner, rec.id) end
  for router in string.gmatch(rec.routers, '[^,]+') do drop_from_index(store, 'attached:' .. router, rec.id) end
end

-- The end of a member's lease and the lease's length, in ms, zeros if there is none; '1' if the store heard its lifeline
-- at the last renewal.
local function lease_of(store, member)
  local lease = redis.call('GET', store.prefix .. 'lease:' .. member) or ''
  local stop, length, heard = string.match(lease, '^(%d+) (%d+) ?(%d*)$')
  return tonumber(stop or 0), tonumber(length or 0), heard
end

local function lease_alive(store, member, now) return lease_of(store, member) > now end
