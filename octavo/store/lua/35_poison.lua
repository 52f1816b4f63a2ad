-- Which sequence is blamed for the deaths of its owners.
--
-- Nobody sees which sequence killed a worker. A sequence is suspected whose owners die one after the other before it has
-- journalled PROOF_TOKENS, while workers that did not run it live. Deaths of other workers say that something else kills,
-- so the more of them there are, the more deaths of its own it takes to blame a sequence.

local MIN_CRASHES = 3             -- so many crashes fail a sequence where no other worker dies
local MAX_CRASHES = 12            -- and so many wherever
local OTHERS_PER_CRASH = 2        -- up to so many other deaths stand for one crash more
local DEATHS_BEFORE_MS = 60000    -- how long before a sequence's first crash the deaths of other workers begin to count
local DEATHS_KEPT_MS = 3600000
local PROOF_TOKENS = 16           -- so many tokens since the last take prove that the sequence is no poison
local MAX_PARDONS = 8             -- owners in a row that may prove it by progress that no journal shows, and get no further
local QUARANTINE_MS = 60000       -- how long a worker counts as running one suspect alone
local OCCUPIED_RETRY_MS = 250
local MAX_OCCUPIED_MS = 10000     -- how long a suspect waits, in all, for workers that run other suspects

-- Remembers the death of a worker, once, at the time when it is first noticed.
local function note_death(store, owner, now)
  local key = store.prefix .. 'deaths'
  redis.call('ZADD', key, 'NX', now, owner)
  redis.call('ZREMRANGEBYSCORE', key, DEATHS_KEPT_MS - now, now - DEATHS_KEPT_MS)
  redis.call('PEXPIRE', key, DEATHS_KEPT_MS)
end

local function suspects_of(rec)
  local suspects = {}
  for suspect in string.gmatch(rec.suspects, '[^,]+') do suspects[#suspects + 1] = suspect end
  return suspects
end

-- How many crashes count against the sequence: those that no poison request has explained. And how many workers have died
-- that it had no part in, since one minute before its first crash.
local function count_deaths(store, rec, now)
  local first = tonumber(rec.first_crash_ms)
  local since = (first > 0 and first or now) - DEATHS_BEFORE_MS
  local key, own = store.prefix .. 'deaths', 0
  local others = redis.call('ZCOUNT', key, since, '+inf')
  for _, suspect in ipairs(suspects_of(rec)) do
    local at = tonumber(redis.call('ZSCORE', key, suspect) or 0)
    if at >= 0 then own = own + 1 end
    if at >= since then others = others - 1 end
  end
  return own, others
end

-- How many crashes of its own the sequence may still have before it fails.
local function crashes_left(store, rec, now)
  local own, others = count_deaths(store, rec, now)
  return math.min(MAX_CRASHES, MIN_CRASHES + math.ceil(others / OTHERS_PER_CRASH)) - own
end

-- Whether the next crash would fail the sequence: it runs alone, so that it alone can be blamed.
local function runs_alone(store, rec, now)
  return tonumber(rec.crashes) >= MIN_CRASHES - 1 and crashes_left(store, rec, now) <= 1
end

-- Whether this worker is to run another suspect alone; and whether it has announced that it does. If the worker dies after
-- that, the other suspect is blamed.
local function runs_another_suspect(store, worker, rec, now)
  local mark = redis.call('GET', store.prefix .. 'quarantine:' .. worker)
  if not mark then return false, false end
  local id, stop, begun = string.match(mark, '^(%S+) (%d+) ?(%d?)$')
  local another = id ~= rec.id and tonumber(stop) > now
  return another, another and begun ~= '0'
end

-- The deaths that this sequence is blamed for count for and against no other any more. Their times become negative.
local function explain_deaths(store, suspects)
  for _, suspect in ipairs(suspects) do
    local at = tonumber(redis.call('ZSCORE', store.prefix .. 'deaths', suspect) or 0)
    if at > 0 then redis.call('ZADD', store.prefix .. 'deaths', -at, suspect) end
  end
end

-- Whether the death of its owner counts against the sequence. It does not if another suspect had begun to run alone there. Of a
-- suspect, it counts only if the owner announced that it begins to run the sequence: an owner that was dead when it was
-- given the sequence proves nothing.
local function is_blamed(store, rec, now)
  local announced = rec.crashes == '0' or rec.announced == rec.epoch
  local _, begun = runs_another_suspect(store, rec.owner, rec, now)
  return announced and not begun
end

-- Judges the death of the owner, once. True if it was the one too many for this sequence. It never is where the owner was
-- not told to run the sequence alone: another sequence may have killed the owner. How many crashes fail a sequence may have
-- become fewer since the owner was told.
local function judge_death(store, rec, now)
  local suspects = suspects_of(rec)
  for _, suspect in ipairs(suspects) do
    if suspect == rec.owner then return false end
  end
  note_death(store, rec.owner, now)
  if not is_blamed(store, rec, now) then return false end
  suspects[#suspects + 1] = rec.owner
  if #suspects > MAX_CRASHES then table.remove(suspects, 1) end
  update(rec, {
    crashes = tonumber(rec.crashes) + 1, suspects = table.concat(suspects, ','),
    first_crash_ms = rec.first_crash_ms == '0' and now or rec.first_crash_ms,
  })
  if rec.alone ~= '1' or crashes_left(store, rec, now) > 0 then return false end
  explain_deaths(store, suspects)
  return true
end

-- Whether a sequence that is to run alone must look for another worker, because this one runs another suspect. No
-- sequence waits longer than MAX_OCCUPIED_MS for that.
local function is_occupied(store, rec, worker, waited_ms, now)
  return waited_ms < MAX_OCCUPIED_MS and runs_alone(store, rec, now) and runs_another_suspect(store, worker, rec, now)
end

-- Notes that the owner is to run the sequence alone, if it is; `begun` is 1 if the owner has announced that it does, or 0.
local function begin_quarantine(store, rec, now, begun)
  if rec.alone ~= '1' then return end
  local mark = string.format('%s %.0f %d', rec.id, now + QUARANTINE_MS, begun)
  redis.call('SET', store.prefix .. 'quarantine:' .. rec.owner, mark, 'PX', QUARANTINE_MS + LEASE_LINGER_MS)
end

local function clear_crashes(store, rec)
  clear_quarantine(store, rec)
  update(rec, { crashes = 0, suspects = '', first_crash_ms = 0 })
  note(rec, now_ms(), 'proved', rec.owner)
end

-- Clears the crashes of a sequence that has journalled enough tokens: it does not kill its owner.
local function count_proof(store, key, tokens)
  if redis.call('HINCRBY', key, 'proof', tokens) >= PROOF_TOKENS then clear_crashes(store, fetch(key)) end
end

-- Takes in how many tokens the owner has computed since the take that no journal shows. They prove the sequence, too. But
-- the next owner computes them again, so a poison request might be proved again and again, and kill at the same place: only
-- MAX_PARDONS owners in a row may prove it without getting further than the others.
local function note_progress(store, rec, tokens)
  local best, pardons = tonumber(rec.best), tonumber(rec.pardons)
  local proves = rec.crashes ~= '0' and tokens >= PROOF_TOKENS
  if tokens >= best + PROOF_TOKENS then pardons = 0
  elseif proves then pardons = math.min(pardons + 1, MAX_PARDONS + 1) end
  update(rec, { best = math.max(best, tokens), pardons = pardons })
  if proves and pardons <= MAX_PARDONS then clear_crashes(store, rec) end
end
