-- The time of the server's clock, in milliseconds since 1970. Tests replace this file by another clock.
local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
